"""Read YAML as people read it: a key once, and a value that is written like a word, a date or a time stays text."""

import re
from typing import Any, cast

import yaml

_INTEGER, _EXPONENT = re.compile("0|-?[1-9][0-9]*"), re.compile(r"-?[0-9.]+e[-+][0-9]+|-?\.(inf|nan)")


class _Loader(yaml.SafeLoader):
    """PyYAML's loader without the surprises of YAML 1.1.

    There, `010` is 8, `1_000` and `12:30` are 1000 and 750, `1.10` loses its 0, `on` and `off` are booleans, and of a key that
    is written twice the first value is lost. Here such a value is text, which the field's type then reads or refuses.
    """


def parse(text: str) -> Any:
    """Return the value of a YAML document. Raises yaml.YAMLError, with the lines, also for a key that is written twice."""
    return yaml.load(text, Loader=_Loader)


def means_more(text: str) -> bool:
    """Return whether YAML 1.1 reads this text as a number or a boolean."""
    tag = yaml.SafeLoader("").resolve(yaml.ScalarNode, text, (True, False))
    return tag.rpartition(":")[2] in ("int", "float", "bool")


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            raise yaml.YAMLError(f"{name} is written twice, in lines {lines[name]} and {line}; keep one of them")
        lines[name] = line
    loader.flatten_mapping(node)
    return cast(dict[Any, Any], loader.construct_mapping(node, deep=True))


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float | str:
    text = str(node.value)
    if node.tag.endswith(":int"):
        return int(text) if _INTEGER.fullmatch(text) else text
    value = loader.construct_yaml_float(node)
    return value if _EXPONENT.fullmatch(text) or str(value) == text else text


def _boolean(loader: _Loader, node: yaml.ScalarNode) -> bool | str:
    return {"true": True, "false": False}.get(node.value.lower(), str(node.value))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
_Loader.add_constructor("tag:yaml.org,2002:bool", _boolean)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: str(node.value))
