"""Conversations to prompts: as transformers renders them, and hostile ones inside their bounds."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mural_resolvers.errors import UnusableAdapter
from mural_server.api import template_worker
from mural_server.api.chat_template import (
    AdapterTemplates,
    Rendering,
    SandboxedRenderer,
    render_trusted,
)
from mural_server.api.errors import BadParameter
from mural_server.api.template_worker import TemplateRefused, TemplateUnusable

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = [
    CHATML,
    # Blocks on lines of their own, which trim_blocks and lstrip_blocks make disappear.
    "{% for m in messages %}\n    {% if m.role == 'user' %}\n[INST] {{ m.content }} [/INST]\n"
    "    {% else %}\n{{ m.content | trim }}{{ eos_token }}\n    {% endif %}\n{% endfor %}\n",
    "{{ bos_token }}{% for m in messages %}{% if loop.index0 == 9 %}{% break %}{% endif %}"
    "{{ m | tojson }}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:"
    "{{ m['content'] }}|{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "{% macro say(m) %}<{{ m.role }}>{{ m.content }}</>{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}"
    "{% if colour is defined %}{{ colour }}{% endif %}",
]
MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "Wörld ☃?\n"},
    {"role": "assistant", "content": "  An answer. "},
]
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def context(messages, **more):
    base = {"messages": messages, "tools": None, "documents": None}
    return base | {"add_generation_prompt": False} | SPECIAL | more


@pytest.mark.parametrize("place", range(len(TEMPLATES)))
def test_rendering_agrees_with_transformers(byte_tokenizer, place):
    for add, colour in itertools.product((False, True), (None, "red")):
        kwargs = {"colour": colour} if colour else {}
        expected = byte_tokenizer.apply_chat_template(
            MESSAGES,
            chat_template=TEMPLATES[place],
            tokenize=False,
            add_generation_prompt=add,
            **kwargs,
        )
        found = template_worker.render(
            TEMPLATES[place], context(MESSAGES, add_generation_prompt=add, **kwargs)
        )
        assert found == expected


@pytest.mark.parametrize("final", ["An answer", " begun with ", "ended with ", "twice twice", "."])
def test_continuing_the_last_message_agrees_with_transformers(byte_tokenizer, final):
    messages = [*MESSAGES[:2], {"role": "assistant", "content": final}]
    expected = byte_tokenizer.apply_chat_template(
        messages, chat_template=CHATML, tokenize=False, continue_final_message=True
    )
    found = template_worker.render(CHATML, context(messages), continue_final_message=True)
    assert found == expected


async def test_the_servers_own_template_renders_in_process(byte_tokenizer):
    text = render_trusted(Rendering(template=CHATML, context=context(MESSAGES[:1])))
    assert text.startswith("<|im_start|>system")
    with pytest.raises(BadParameter, match="roles must alternate"):
        render_trusted(
            Rendering(
                template="{{ raise_exception('roles must alternate') }}",
                context=context(MESSAGES),
            )
        )


@pytest.fixture
async def sandbox() -> AsyncIterator[SandboxedRenderer]:
    renderer = SandboxedRenderer(deadline_s=5.0)
    yield renderer
    await renderer.close()


async def test_the_sandbox_renders_as_the_process_does(sandbox):
    for template in TEMPLATES:
        rendering = Rendering(template=template, context=context(MESSAGES))
        assert await sandbox.render(rendering) == render_trusted(rendering)


HOSTILE = {
    "no template": "{% for %}",
    "escape by class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "escape by globals": "{{ cycler.__init__.__globals__ }}",
    "escape by format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "mutation": "{{ messages.append(1) }}{{ messages.clear() }}",
    "great range": "{% for i in range(10**9) %}x{% endfor %}",
    "great text": "{{ 'x' * 10**9 }}{{ 'x' * 10**10 }}",
    "great output": "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "great number": "{{ 10 ** (10 ** 10) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep nesting": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
}


async def test_hostile_templates_are_refused_and_the_next_one_renders(sandbox):
    for name, template in HOSTILE.items():
        with pytest.raises((TemplateUnusable, TemplateRefused)):
            print(
                name,
                (await sandbox.render(Rendering(template=template, context=context(MESSAGES))))[
                    :500
                ],
            )
        ok = Rendering(template="fine", context=context(MESSAGES))
        assert await sandbox.render(ok) == "fine", name


async def test_a_template_that_never_ends_is_killed(sandbox):
    sandbox.deadline_s = 0.5
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateUnusable, match=r"longer than 0\.5 s"):
        await sandbox.render(Rendering(template=loops, context=context(MESSAGES)))
    sandbox.deadline_s = 10.0
    ok = Rendering(template="fine", context=context(MESSAGES))
    assert await sandbox.render(ok) == "fine"


async def test_an_unusable_template_is_remembered_rather_than_run_again():
    class Counting(SandboxedRenderer):
        runs = 0

        async def render(self, rendering: Rendering) -> str:
            self.runs += 1
            raise TemplateUnusable("it takes longer than 2 s")

    renderer = Counting()
    templates = AdapterTemplates(renderer)
    for _ in range(3):
        with pytest.raises(UnusableAdapter, match="longer"):
            await templates.render(Rendering(template="x", context={}))
    assert renderer.runs == 1


async def test_an_adapters_own_template_is_used_for_it_alone(server, adapter_dir, make_adapter):
    make_adapter(adapter_dir / "acme/default/v3", 9, template="<<{{ messages[0].content }}>>")
    await server.chat(model="acme:v3")
    await server.chat(model="acme:v1")
    decode = server.state.texts.decode
    assert await decode(server.engine.requests[0].prompt_token_ids) == "<<Hi>>"
    assert "<|im_start|>" in await decode(server.engine.requests[1].prompt_token_ids)
    counted = await server.post(
        "/tokenize", {"model": "acme:v3", "messages": [{"role": "user", "content": "Hi"}]}
    )
    assert counted.json()["count"] == 6


async def test_a_hostile_template_of_an_adapter_is_4xx(server, adapter_dir, make_adapter):
    make_adapter(adapter_dir / "acme/default/bad", 10, template="{{ ''.__class__.__mro__ }}")
    make_adapter(adapter_dir / "acme/default/odd", 11, template="{{ raise_exception('no') }}")
    assert (await server.chat(model="acme:bad")).status_code == 422
    refused = await server.chat(model="acme:odd")
    assert refused.status_code == 400
    assert "no" in refused.json()["error"]["message"]
    assert (await server.chat(model="tiny")).status_code == 200


async def test_a_template_that_changed_after_it_was_checked_is_refused(
    server, adapter_dir: Path, make_adapter, tmp_path
):
    folder = make_adapter(adapter_dir / "acme/default/v4", 12, template="{{ messages[0].content }}")
    assert (await server.complete(model="acme:v4")).status_code == 200
    secret = tmp_path / "secret"
    secret.write_text("{{ 'the secret' }}")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(secret)
    response = await server.chat(model="acme:v4")
    assert response.status_code == 422
    assert "changed" in response.json()["error"]["message"]


async def test_options_reach_the_template(server):
    body = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    answer = await server.chat(**body)
    assert answer.status_code == 200, answer.text
    prompt = await server.state.texts.decode(server.engine.requests[0].prompt_token_ids)
    assert prompt.endswith("<|im_start|>assistant\nSo")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await server.chat(messages=[{"role": "user", "content": parts}])
    prompt = await server.state.texts.decode(server.engine.requests[1].prompt_token_ids)
    assert "user\nab<|im_end|>" in prompt
