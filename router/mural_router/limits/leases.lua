-- What all routers have used of tenants' limits, and the leases that one router asks for.
--
-- KEYS[1]: the routers. KEYS[2 ...]: one hash for each tenant that is asked for:
--   'm'       {first second, requests, tokens} of all cells together
--   'r'       by router: {sequence, second, requests, tokens, held, until}: its last call
--             and what that call gave it
--   <second>  {requests, tokens} counted under that second
-- ARGV[1]: the router's id. ARGV[2]: {beat, last beat, leaving, held for s, tenants}.
-- All of it is msgpack.
--
-- A router's call has a number. A call that came already (its answer was lost) is answered as
-- it was and changes nothing; one that follows no call known here says that something was
-- lost, and the router is asked to tell everything again. So it is with books of a time to come:
-- the store's clock went back, and what they count would not leave until that time is over.

local WINDOW_S = 60
local REMEMBER_S = 130
local CLOCK_ERROR_S = 2  -- a clock that is put right by less changes nothing

local OK, LOST = 0, 1

local me = ARGV[1]
local beat, last_beat, leaving, held_s, asked = unpack(cmsgpack.unpack(ARGV[2]))
local time = redis.call('TIME')
local second = tonumber(time[1])
local now = second + tonumber(time[2]) / 1000000
local oldest = second - WINDOW_S

-- Who shares the limits.
local routers, kept = 0, 1
local known = redis.call('HGETALL', KEYS[1])
for i = 2, #known, 2 do
  if cmsgpack.unpack(known[i])[2] > now + CLOCK_ERROR_S then
    redis.call('DEL', KEYS[1])
    known = {}
    break
  end
end
for i = 1, #known, 2 do
  local number, seen = unpack(cmsgpack.unpack(known[i + 1]))
  if known[i] == me then
    if number < last_beat then kept = 0 end
    last_beat = 0
  elseif seen + REMEMBER_S < now then
    redis.call('HDEL', KEYS[1], known[i])
  elseif seen + held_s > now then
    routers = routers + 1
  end
end
if last_beat > 0 then kept = 0 end
if leaving == 1 then
  redis.call('HDEL', KEYS[1], me)
else
  routers = routers + 1
  redis.call('HSET', KEYS[1], me, cmsgpack.pack({beat, now}))
  redis.call('EXPIRE', KEYS[1], REMEMBER_S)
end

-- Seconds until an amount fits below a limit; which: 1 requests, 2 tokens.
local function wait_s(key, first, total, limit, amount, which)
  local bound = math.max(0, limit - amount)
  local fields = {}
  for s = first, second + CLOCK_ERROR_S do fields[#fields + 1] = s end
  local cells = redis.call('HMGET', key, unpack(fields))
  for i = 1, #fields do
    if cells[i] then
      total = total - cmsgpack.unpack(cells[i])[which]
      if total <= bound then return math.max(0, fields[i] + WINDOW_S + 1 - now) end
    end
  end
  return 1
end

-- All that is needed, and a part of what is left then: all routers together get half of it.
local function grant(limit, total, need, want)
  if limit < 0 then return 0 end
  local left = limit - total
  if left < need then return math.max(0, left) end
  return math.min(want, need + math.floor((left - need) / (2 * routers)))
end

local function account(key, call)
  local sequence, base, limit_requests, limit_tokens, limit_sequences,
    need_requests, want_requests, need_tokens, want_tokens, first_tokens,
    open, need_sequences, want_sequences, changes = unpack(call)
  if leaving == 1 then
    want_requests, want_tokens, want_sequences = need_requests, need_tokens, need_sequences
  end
  local stored = redis.call('HMGET', key, 'm', 'r')
  local all = stored[2] and cmsgpack.unpack(stored[2]) or {}
  for _, last in pairs(all) do
    if last[7] > now + CLOCK_ERROR_S then
      redis.call('DEL', key)
      stored, all = {}, {}
      break
    end
  end
  local mine = all[me]
  if mine and mine[1] == sequence then
    return {OK, mine[2], mine[3], mine[4], mine[5], 0, 0}
  end
  if base > 0 and not (mine and mine[1] == base) then
    -- Older than what was acknowledged: nothing in it is right, so nobody may count on it.
    if mine then redis.call('DEL', key) end
    return {LOST, second, 0, 0, 0, 0, 0}
  end

  local first, requests, tokens = second, 0, 0
  if stored[1] then first, requests, tokens = unpack(cmsgpack.unpack(stored[1])) end
  local cells, written = {}, {}
  local function cell(s)
    if not cells[s] then
      local raw = redis.call('HGET', key, s)
      cells[s] = raw and cmsgpack.unpack(raw) or {0, 0}
    end
    return cells[s]
  end

  -- What is a minute old leaves.
  if first < oldest then
    local gone = {}
    for s = first, oldest - 1 do
      local counted = cell(s)
      requests, tokens = requests - counted[1], tokens - counted[2]
      gone[#gone + 1] = s
    end
    redis.call('HDEL', key, unpack(gone))
    first = oldest
  end

  local function count(s, more_requests, more_tokens)
    if s < oldest or (more_requests == 0 and more_tokens == 0) then return end
    local counted = cell(s)
    counted[1], counted[2] = counted[1] + more_requests, counted[2] + more_tokens
    requests, tokens = requests + more_requests, tokens + more_tokens
    written[s] = true
    if s < first then first = s end
  end
  for i = 1, #changes, 3 do count(changes[i], changes[i + 1], changes[i + 2]) end

  local got_requests = grant(limit_requests, requests, need_requests, want_requests)
  local got_tokens = grant(limit_tokens, tokens, need_tokens, want_tokens)
  local wait_requests, wait_tokens = 0, 0
  if need_requests > 0 and limit_requests >= 0 and requests + 1 > limit_requests then
    wait_requests = wait_s(key, first, requests, limit_requests, 1, 1)
  end
  if first_tokens > 0 and limit_tokens >= 0 and tokens + first_tokens > limit_tokens then
    wait_tokens = wait_s(key, first, tokens, limit_tokens, first_tokens, 2)
  end
  count(second, got_requests, got_tokens)

  -- Sequences at one time: what each router holds, for as long as it is heard of.
  local others = 0
  for id, last in pairs(all) do
    if last[7] + REMEMBER_S < now then
      all[id] = nil
    elseif id ~= me and last[6] > now then
      others = others + last[5]
    end
  end
  local held = open + grant(limit_sequences, others + open, need_sequences, want_sequences)

  all[me] = {sequence, second, got_requests, got_tokens, held, now + held_s, now}
  local fields = {'m', cmsgpack.pack({first, requests, tokens}), 'r', cmsgpack.pack(all)}
  for s in pairs(written) do
    fields[#fields + 1] = s
    fields[#fields + 1] = cmsgpack.pack(cells[s])
  end
  redis.call('HSET', key, unpack(fields))
  redis.call('EXPIRE', key, REMEMBER_S)
  return {OK, second, got_requests, got_tokens, held, wait_requests, wait_tokens}
end

local answers = {}
for i, call in ipairs(asked) do answers[i] = account(KEYS[i + 1], call) end
return cmsgpack.pack({now, routers, kept, answers})
