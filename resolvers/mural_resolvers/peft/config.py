"""``adapter_config.json``: PEFT's LoRA configuration, its rules, and what of it is not served.

The rules are those of PEFT 0.21 (``check_target_module_exists``, ``get_pattern_key``,
``LoraLayer.update_layer``) and are held to it in tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from mural_resolvers.errors import UnusableAdapter, quoted
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.peft.fields import Fields
from mural_resolvers.peft.patterns import PatternRules, compiled
from mural_resolvers.strict_json import JsonRefused, JsonValue, parse_object

__all__ = ["PeftConfig"]

_DEFAULT_RANK = 8
_DEFAULT_ALPHA = 8.0
_ALL_LINEAR = "all-linear"

# modules_to_save stores whole tensors; these two are taken if they equal the base's.
_KNOWN_MODULES_TO_SAVE = frozenset({"lm_head", "embed_tokens"})

# Initialisations that leave the base's weights as they are (others need PEFT's conversion).
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})

# Keys of PEFT (and of older versions and other trainers) that do not change the forward pass.
_INERT = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_dtype",
        "lora_ga_config",
        "lorap_emb_lr",
        "lorap_lr_ratio",
        "megatron_core",
        "merge_weights",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)

# Features that change the forward pass and are not served, with the reason that is told.
_UNSUPPORTED = {
    "use_dora": "DoRA (use_dora) is not supported",
    "lora_bias": "a bias on lora_B (lora_bias) is not supported",
    "layer_replication": "layer_replication is not supported",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens) is not supported",
    "trainable_token_indices": "trainable_token_indices is not supported",
    "target_parameters": "target_parameters is not supported",
    "megatron_config": "megatron_config is not supported",
    "ensure_weight_tying": "tied adapters (ensure_weight_tying) are not supported",
    "use_qalora": "QALoRA (use_qalora) is not supported",
    "use_bdlora": "block-diagonal LoRA (use_bdlora) is not supported",
    "arrow_config": "Arrow routing (arrow_config) is not supported",
    "kasa_config": "KaSA (kasa_config) is not supported",
    "velora_config": "VeLoRA (velora_config) is not supported",
    "monteclora_config": "MonteCLoRA (monteclora_config) is not supported",
}


@dataclass(frozen=True)
class PeftConfig:
    """A LoRA configuration as PEFT reads it; ``refusals`` says what of it cannot be served.

    ``target_modules`` is a tuple of names or suffixes, or a string: a regular expression or
    ``all-linear``. Module names given to the methods are those of the base that the adapter was
    trained on, without PEFT's ``base_model.model.``.
    """

    r: int = _DEFAULT_RANK
    lora_alpha: float = _DEFAULT_ALPHA
    use_rslora: bool = False
    target_modules: tuple[str, ...] | str = ()
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    modules_to_save: tuple[str, ...] = ()
    bias: str = "none"
    use_dora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str = True
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    refusals: tuple[str, ...] = field(default=())

    @classmethod
    def from_json(cls, data: bytes, limits: AdapterLimits = DEFAULT_LIMITS) -> PeftConfig:
        """Read ``adapter_config.json``; raise ``UnusableAdapter`` where PEFT could not read it.

        No regular expression of the file is compiled or matched here, so this is safe outside
        the loader process. What is readable but not served is listed in ``refusals``.
        """
        try:
            raw = parse_object(
                data, max_bytes=limits.max_config_bytes, max_depth=limits.max_json_depth
            )
        except JsonRefused as error:
            raise UnusableAdapter(f"adapter_config.json cannot be read: {error}.") from None
        _check_peft_type(raw)
        fields = Fields(raw, limits)
        config = cls(
            r=fields.rank("r", _DEFAULT_RANK),
            lora_alpha=fields.number("lora_alpha", _DEFAULT_ALPHA),
            use_rslora=fields.flag("use_rslora"),
            target_modules=fields.names_or_regex("target_modules"),
            exclude_modules=fields.names_or_regex("exclude_modules"),
            layers_to_transform=fields.layer_indices("layers_to_transform"),
            layers_pattern=fields.patterns("layers_pattern"),
            rank_pattern=fields.rank_pattern("rank_pattern"),
            alpha_pattern=fields.number_pattern("alpha_pattern"),
            modules_to_save=fields.patterns("modules_to_save"),
            bias=fields.text("bias") or "none",
            use_dora=fields.flag("use_dora"),
            lora_bias=fields.flag("lora_bias"),
            fan_in_fan_out=fields.flag("fan_in_fan_out"),
            init_lora_weights=fields.flag_or_text("init_lora_weights", True),
            task_type=fields.text("task_type"),
            base_model_name_or_path=fields.text("base_model_name_or_path"),
            refusals=tuple(
                [reason for key, reason in _UNSUPPORTED.items() if _is_set(raw.get(key))]
                + [
                    f"the key {quoted(key)} is not known"
                    for key in fields.unread(_INERT | _UNSUPPORTED.keys() | {"peft_type"})
                    if _is_set(raw[key])
                ]
            ),
        )
        config._check_consistency()
        return config

    def _check_consistency(self) -> None:
        if isinstance(self.target_modules, str) and (
            self.layers_to_transform or self.layers_pattern
        ):
            raise UnusableAdapter(
                "adapter_config.json cannot be read: layers_to_transform and layers_pattern "
                "need a list of target_modules."
            )
        if self.layers_pattern and not self.layers_to_transform:
            raise UnusableAdapter(
                "adapter_config.json cannot be read: layers_pattern needs layers_to_transform."
            )

    def refuse_unsupported(self) -> None:
        """Raise ``UnusableAdapter`` naming each feature that would change the answers."""
        reasons = [*self.refusals, *self._refused_values()]
        if reasons:
            raise UnusableAdapter(f"The adapter is not supported: {'; '.join(reasons[:5])}.")

    def _refused_values(self) -> list[str]:
        reasons = []
        if not self.target_modules:
            reasons.append("target_modules names no module")
        if self.bias != "none":
            reasons.append(f"bias={quoted(self.bias)} is not supported, only 'none'")
        if self.task_type not in (None, "CAUSAL_LM"):
            reasons.append(f"task_type={quoted(self.task_type)} is not supported, only CAUSAL_LM")
        unknown = [name for name in self.modules_to_save if name not in _KNOWN_MODULES_TO_SAVE]
        if unknown:
            reasons.append(f"modules_to_save={quoted(unknown[0])} is not supported")
        init = self.init_lora_weights
        if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
            reasons.append(
                f"init_lora_weights={quoted(init)} changes the base's weights: save the adapter "
                "with path_initial_model_for_weight_conversion"
            )
        return reasons

    @property
    def max_rank(self) -> int:
        """The largest rank that the configuration gives any module."""
        return max(self.r, *(rank for _, rank in self.rank_pattern), 0)

    @cached_property
    def _rank_rules(self) -> PatternRules[int]:
        return PatternRules(self.rank_pattern)

    @cached_property
    def _alpha_rules(self) -> PatternRules[float]:
        return PatternRules(self.alpha_pattern)

    def rank_for(self, module: str) -> int:
        """The module's rank: the first matching key of ``rank_pattern``, else ``r``."""
        return self._rank_rules.first(module, self.r)

    def alpha_for(self, module: str) -> float:
        """The module's alpha: the first matching key of ``alpha_pattern``, else ``lora_alpha``."""
        return self._alpha_rules.first(module, self.lora_alpha)

    def scale_for(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA (arXiv 2312.03732)."""
        rank = self.rank_for(module)
        return self.alpha_for(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str, *, is_linear: bool = True) -> bool:
        """Tell whether PEFT would put an adapter on the module.

        ``is_linear`` says that it is a linear layer other than the output head, which is what
        ``all-linear`` means. Matches the file's regular expressions: for the loader process.
        Raises ``UnusableAdapter`` for an expression that does not compile.
        """
        if self._excludes(module):
            return False
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == _ALL_LINEAR:
                return is_linear
            return compiled(self.target_modules).fullmatch(module) is not None
        if module in self._target_names:
            return True
        return _has_suffix(module, self._target_names) and self._in_layers(module)

    @cached_property
    def _target_names(self) -> frozenset[str]:
        return frozenset(self.target_modules)

    @cached_property
    def _excluded_names(self) -> frozenset[str]:
        return frozenset(self.exclude_modules)

    def _excludes(self, module: str) -> bool:
        if isinstance(self.exclude_modules, str):
            if self.exclude_modules and compiled(self.exclude_modules).fullmatch(module):
                return True
        elif module in self._excluded_names or _has_suffix(module, self._excluded_names):
            return True
        return any(
            compiled(rf"(^|.*\.){name}($|\..*)").match(module) for name in self.modules_to_save
        )

    def _in_layers(self, module: str) -> bool:
        if not self.layers_to_transform:
            return True
        # The first number is the layer's: a later one may be an expert's.
        patterns = self.layers_pattern or (None,)
        for pattern in patterns:
            text = r".*?\.[^.]*" if pattern is None else rf"(?:^|.*?\.){pattern}"
            if match := compiled(rf"{text}\.(?P<idx>\d+)\.").match(module):
                return int(match["idx"]) in self.layers_to_transform
        return False


def _has_suffix(module: str, names: frozenset[str]) -> bool:
    """Whether one of the names is the module's ending after a dot."""
    at = module.find(".")
    while at != -1:
        if module[at + 1 :] in names:
            return True
        at = module.find(".", at + 1)
    return False


def _check_peft_type(raw: dict[str, JsonValue]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        told = quoted(kind) if isinstance(kind, str) else "none"
        raise UnusableAdapter(f"The adapter's peft_type is {told}; only LORA is supported.")


def _is_set(value: JsonValue) -> bool:
    return not (value is None or value is False or value in ("", [], {}))
