#!/usr/bin/env bash
# Set up a virtual environment, once and whenever one of its files changes:
#   PYTHON="python3.11 python3.12" EDITABLE=1 requirements/venv.sh FOLDER PINS [FILE...]
# It gets the packages of PINS, with EDITABLE this one, and OTHER, whatever Python that package requires. Its Python is the first
# that has venv and a wheel of every package.
set -e
folder=$1 pins=$2
sum=$(cat "${@:3}" "$pins" | sha256sum)
if [ "$(cat "$folder/.ready" 2> /dev/null)" = "$sum" ]; then touch "$folder/.ready"; exit 0; fi
echo "setting up $folder (once; some minutes if packages must be downloaded)"
for python in $PYTHON; do
  "$python" -c "import ensurepip, venv" 2> /dev/null || continue
  test -x "$folder/bin/uv" || { rm -rf "$folder"; "$python" -m venv "$folder"; "$folder/bin/python" -m pip install --quiet "uv>=0.9"; }
  install=("$folder/bin/uv" pip install --no-config --python "$folder/bin/python" --no-deps --quiet)
  if "${install[@]}" --compile-bytecode -r "$pins"; then
    test -z "$OTHER" || "$folder/bin/python" -m pip install --quiet --no-deps --ignore-requires-python "$OTHER"
    test -z "$EDITABLE" || "${install[@]}" --editable .
    echo "$sum" > "$folder/.ready"
    exit 0
  fi
  echo "$("$folder/bin/python" --version): some package of $pins cannot be installed (see above)"
  rm -rf "$folder"
done
echo "no Python of '$PYTHON' has venv and every package of $pins: install one, or give make PYTHON=..."
exit 1
