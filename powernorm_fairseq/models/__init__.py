"""fairseq models with a norm of choice at each site; importing this package registers them."""

from powernorm_fairseq.models import architectures

__all__ = ["architectures"]
