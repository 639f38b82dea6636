"""Drafters on disk: what serving engines read, and what others have trained."""

from specjax.drafters.stored.identity import fingerprint
from specjax.drafters.stored.loading import load_drafter
from specjax.drafters.stored.saving import save_drafter

__all__ = ["fingerprint", "load_drafter", "save_drafter"]
