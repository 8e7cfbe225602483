"""Owns the reading of YAML that says each thing once: no key twice, no alias; must not know what a document means."""

from typing import Any

import yaml


def load_strict(text: str) -> object:
    """A YAML document of maps, lists and scalars.

    Raises:
        ValueError: It is not YAML, gives a key twice, or has an anchor or an alias, of which a few lines can mean billions
            of values; one line that says where.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506  a SafeLoader
    except yaml.YAMLError as exc:
        raise ValueError(" ".join(str(exc).split())) from exc
    except RecursionError as exc:
        raise ValueError("nested too deeply; a plan needs five levels") from exc


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None:
            raise yaml.composer.ComposerError(
                None, None, f"anchor or alias {event.anchor!r}; write the value out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is given twice; keep one", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)
