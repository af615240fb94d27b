"""Where the API server is and who asks it."""

from __future__ import annotations

import os

import yaml
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

__all__ = ["SingleConfig", "cluster_config"]


def cluster_config() -> SingleConfig:
    """The pod's own service account, else ``KUBECONFIG``, else ``~/.kube/config``.

    Raises ValueError where there is none, or none that can be read.
    """
    try:
        config = KubeConfig.from_env().get()
    except ConfigError as error:
        raise ValueError(f"no Kubernetes to ask: {error}") from None
    except (AttributeError, LookupError, TypeError, ValueError, OSError, yaml.YAMLError) as error:
        # A name that nothing has, a field of another form, a file that is not for us to read.
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"no Kubernetes to ask: the configuration {_path()} cannot be read as one ({problem})"
        ) from None
    if config is None:
        raise ValueError(
            f"no Kubernetes to ask: {_path()} chooses no context; kubectl config use-context does"
        )
    return config


def _path() -> str:
    return os.environ.get("KUBECONFIG") or "~/.kube/config"
