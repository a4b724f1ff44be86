"""Texts that shall not be sent: a list of words (``--moderation-words``), or a function of the user's own
(``--moderation``)."""
