#!/usr/bin/env bash
# Install pins without their dependencies into a folder, once and whenever they change: requirements/target.sh BIN FOLDER PINS
set -e
bin=$1 folder=$2 pins=$3
sum=$(sha256sum < "$pins")
if [ "$(cat "$folder/.ready" 2> /dev/null)" != "$sum" ]; then
  rm -rf "$folder"
  "$bin/uv" pip install --no-config --python "$bin/python" --no-deps --quiet --target "$folder" -r "$pins"
  echo "$sum" > "$folder/.ready"
fi
touch "$folder/.ready"
