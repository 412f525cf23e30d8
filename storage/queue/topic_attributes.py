"""Reads the topics' attributes from config/topics.json, RocketMQ's file. The broker writes the file some seconds after
a change."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.attributes import TopicAttributes
from storage.files.config_files import ConfigFiles, parse_fastjson

TOPICS_FILE: Final = "topics.json"
SETTLED_MS: Final = 60_000
"""Minimum age, in ms, of a message that certainly belongs to the topic described in config/topics.json.

A younger message may belong to an earlier topic of the same name, which had other attributes and was deleted.
"""

logger = logging.getLogger(__name__)


class StoredAttributes:
    """Reads the attributes of one store's topics. Only one thread at a time may use the object."""

    def __init__(self, config: ConfigFiles) -> None:
        self._config = config
        self._text: str | None = None
        self._attributes: Mapping[str, TopicAttributes] = {}

    def read(self) -> Mapping[str, TopicAttributes]:
        """Return the attributes of each topic; topics without attributes are omitted."""
        text = self._config.read(TOPICS_FILE)
        if text != self._text:
            self._text, self._attributes = text, parse_attributes(text)
        return self._attributes


def parse_attributes(topics_json: str | None) -> dict[str, TopicAttributes]:
    """Parse the attributes of each topic from the text of topics.json. Invalid attributes are ignored.

    If the text is not in RocketMQ's format, the result is empty: topics have no attributes until the broker rewrites
    the file.
    """
    try:
        table = _mapping(_mapping(parse_fastjson(topics_json or "{}")).get("topicConfigTable"))
    except ValueError as error:
        logger.warning(
            "cannot parse the attributes of topics; topics have no attributes until the broker rewrites file %s: %s",
            TOPICS_FILE,
            error,
        )
        return {}
    found: dict[str, TopicAttributes] = {}
    for topic, entry in table.items():
        attributes = _mapping(_mapping(entry).get("attributes"))
        if attributes:
            try:
                found[topic] = TopicAttributes.parse(attributes)
            except InvalidArgumentError as error:
                logger.warning("the invalid attributes of topic %s are ignored: %s", topic, error)
    return found


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
