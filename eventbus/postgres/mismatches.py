"""What to say of a schema whose steps are not those of this code: each side is called by its name, bus or plugin.

Before it: ``migrate`` has compared the steps. After it: an error. Steps are given by name, those of a plugin as
``plugin/step``. What is wrong with the bus's own steps goes first, then what is wrong with one plugin's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def changed(names: Sequence[str], schema: str) -> str:
    """These steps had another text when they were applied."""
    plugin, steps = _first_owner(names)
    if plugin is None:
        return (
            f'schema "{schema}" was made by another development version of eventbus (not the same: {steps}), and '
            "no step leads from there to here: drop the schema and run eventbus migrate, or go back to that version"
        )
    forget = f"DELETE FROM \"{schema}\".migrations WHERE starts_with(name, '{plugin}/')"  # noqa: S608 - is only said
    return (
        f'plugin {plugin} has changed a step that made its tables in schema "{schema}" (not the same: {steps}): undo '
        "the change and add a new step instead; or drop the tables of this plugin and let eventbus migrate make them "
        f"anew, after: {forget}"
    )


def unknown(names: Sequence[str], schema: str) -> str:
    """These steps were applied, and this code does not have them."""
    plugin, steps = _first_owner(names)
    if plugin is None:
        return (
            f'schema "{schema}" was migrated by a newer eventbus ({steps} unknown here); '
            "upgrade this installation of eventbus"
        )
    return (
        f'plugin {plugin} is older than its tables in schema "{schema}" ({steps} unknown here): '
        "upgrade the plugin, or take it out of the setting plugins"
    )


def missing(names: Sequence[str], applied: Collection[str], schema: str) -> str:
    """These steps were not applied, those of ``applied`` were."""
    own = [name for name in names if "/" not in name]
    if own:
        return (
            f'schema "{schema}" is older than this eventbus ({", ".join(own)} missing); '
            "upgrade the schema: eventbus migrate"
        )
    plugins = dict.fromkeys(name.partition("/")[0] for name in names)
    return f"{', '.join(_lacking(plugin, names, applied) for plugin in plugins)}; run: eventbus migrate"


def _lacking(plugin: str, names: Sequence[str], applied: Collection[str]) -> str:
    if not _of(plugin, applied):
        return f"the tables of plugin {plugin} are missing"
    return f"the tables of plugin {plugin} are older than the plugin ({', '.join(_of(plugin, names))} missing)"


def _first_owner(names: Sequence[str]) -> tuple[str | None, str]:
    """Whose steps are told, None for the bus, and which these are."""
    own = [name for name in names if "/" not in name]
    if own:
        return None, ", ".join(own)
    plugin = names[0].partition("/")[0]
    return plugin, ", ".join(_of(plugin, names))


def _of(plugin: str, names: Collection[str]) -> list[str]:
    return [name.partition("/")[2] for name in names if name.startswith(f"{plugin}/")]
