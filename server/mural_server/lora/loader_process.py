"""The process that reads adapters: small, of low priority, and expendable.

Started by `AdapterLoader` as ``python -m mural_server.lora.loader_process FD``. It holds one
adapter at a time and no secret of its parent's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from mural_resolvers.errors import MuralError, Unavailable, UnusableAdapter
from mural_server.lora.checkpoint import LoadPhase, read_checkpoint
from mural_server.lora.loader_protocol import (
    AskBaseDigest,
    BaseDigestAnswer,
    Channel,
    ChannelClosed,
    Load,
    Loaded,
    PhaseBegins,
    Refused,
    Start,
)
from mural_server.lora.shared_payload import SharedPayload

logger = logging.getLogger(__name__)


def main(descriptor: int) -> None:
    """Serve loads until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's affair
    # By default both end the process at once, even inside a match that never comes back.
    for name in (signal.SIGALRM, signal.SIGVTALRM):
        signal.signal(name, signal.SIG_DFL)
    channel = Channel(socket.socket(fileno=descriptor))
    with contextlib.suppress(ChannelClosed):
        start = channel.from_parent()
        assert isinstance(start, Start)
        _be_modest(start.nice)
        while True:
            load = channel.from_parent()
            assert isinstance(load, Load)
            signal.setitimer(signal.ITIMER_REAL, load.give_up_s)
            _serve(channel, start, load)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _be_modest(nice: int) -> None:
    """Leave the cores to the step loop, and be the one that goes when memory runs out."""
    os.nice(nice)
    # Not every system has or allows these two, and none needs them.
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            # Batch tasks do not preempt others when they wake up.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _serve(channel: Channel, start: Start, load: Load) -> None:
    def base_digest(module: str) -> str | None:
        channel.send(AskBaseDigest(module))
        answer = channel.from_parent()
        assert isinstance(answer, BaseDigestAnswer)
        return answer.digest

    def on_phase(phase: LoadPhase) -> None:
        channel.send(PhaseBegins(phase))
        # Processor time: a good adapter is not refused because the machine is busy.
        signal.setitimer(signal.ITIMER_VIRTUAL, load.judge_cpu_s if phase == "judge" else 0)

    payload = SharedPayload()
    try:
        # The payload itself is not kept here: memory that anybody views cannot be sealed.
        header = read_checkpoint(
            Path(load.path),
            start.base,
            start.options,
            load.expected_digest,
            base_digest,
            on_phase,
            payload.allocate,
        )[0]
        descriptor = None if load.check_only else payload.seal()
    except ChannelClosed:
        raise
    except MuralError as error:
        channel.send(Refused(error.code, error.message))
    except MemoryError:
        channel.send(Refused(Unavailable.code, "There is not enough memory to read the adapter."))
    except Exception as error:
        # A reader's fault on hostile input is the input's: refused, and told in the log.
        logger.exception("reading an adapter failed")
        reason = f"The adapter's files cannot be read ({type(error).__name__})."
        channel.send(Refused(UnusableAdapter.code, reason))
    else:
        channel.send(Loaded(header))
        if descriptor is not None:
            channel.send_descriptor(descriptor)
    finally:
        payload.close()


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s adapter loader: %(message)s")
    main(int(sys.argv[1]))
