"""Reading a Prometheus page in tests."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


class Page:
    """The samples of a page: ``page["name", "label=value", ...]`` is a value, KeyError if it is not there."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = {
            (sample.name, frozenset(f"{name}={value}" for name, value in sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __getitem__(self, key: str | tuple[str, ...]) -> float:
        name, *labels = (key,) if isinstance(key, str) else key
        return self.samples[name, frozenset(labels)]

    def labels_of(self, name: str) -> list[frozenset[str]]:
        """Label sets of a sample name."""
        return [labels for found, labels in self.samples if found == name]
