"""Hypothesis strategies that generate the fields of valid messages and of encoded batches."""

from __future__ import annotations

from hypothesis import strategies as st

from raymq.common.message import RESERVED_PROPERTIES

INT32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=20).filter(
    lambda text: bool(text.strip())
)
TAGS = TEXT.filter(lambda text: text != "*" and "||" not in text and text == text.strip())
KEYS = TEXT.filter(lambda text: " " not in text)
NAMES = TEXT.filter(lambda text: text not in RESERVED_PROPERTIES)
LEGAL = "%|abcXYZ019_-"
TOPICS = st.text(LEGAL, min_size=1, max_size=127) | st.text(LEGAL, max_size=248).map(lambda text: "%RETRY%" + text)
HOSTS = st.tuples((st.ip_addresses(v=4) | st.ip_addresses(v=6)).map(str), INT32)
