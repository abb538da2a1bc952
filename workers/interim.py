from __future__ import annotations


class EpisodeFailed(Exception):
    kind = message = ""
