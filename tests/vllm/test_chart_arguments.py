"""What the chart starts vLLM with is what this vLLM takes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

GOLDEN = Path(__file__).parents[1] / "charts" / "golden"
# Reads the arguments on its input; no engine is started.
READ = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
taken = make_arg_parser(FlexibleArgumentParser()).parse_args(json.load(sys.stdin))
names = ("max_loras", "max_cpu_loras", "max_lora_rank", "quantization", "tensor_parallel_size")
print(json.dumps([taken.model_tag, *(getattr(taken, name) for name in names)]))
"""
READ_S = 120


def arguments(preset: str) -> list[str]:
    """Those after ``vllm serve``, as the preset renders them."""
    text = (GOLDEN / f"{preset}.yaml").read_text(encoding="utf-8")
    objects: list[dict[str, Any]] = [each for each in yaml.safe_load_all(text) if each]
    (stateful,) = (each for each in objects if each["kind"] == "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    command, *rest = container["args"]
    assert command == "serve"
    return [str(each) for each in rest]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("preset", "taken"),
    [
        ("rag", ["/models/llama-3.3-70b-instruct-gptq", 16, 64, 64, "gptq", 2]),
        ("multi-domain", ["/models/qwen2.5-72b-instruct", 4, 8, 16, None, 4]),
    ],
)
def test_vllm_takes_the_arguments_of_a_preset(
    vllm_command: Path, preset: str, taken: list[object]
) -> None:
    done = subprocess.run(
        [vllm_command.with_name("python"), "-c", READ],
        input=json.dumps(arguments(preset)),
        capture_output=True,
        text=True,
        timeout=READ_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == taken
