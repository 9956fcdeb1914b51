"""Several caches of one layer, held together: attention beside a scan, latents beside an indexer's keys."""

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.protocol import Cache, check_trim


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheGroup:
    """Members in the order that the layer gives them.

    Attributes:
        members: At least one cache.
    """

    members: tuple[Cache, ...]

    @property
    def offset(self) -> int:
        """Tokens ever seen by the first member."""
        return self.members[0].offset

    @property
    def kind(self) -> str:
        """Such as `list[plain,plain]`."""
        return f"list[{','.join(member.kind for member in self.members)}]"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All members' arrays."""
        return tuple(array for member in self.members for array in member.arrays)

    @property
    def trimmable(self) -> bool:
        """Where every member is."""
        return all(member.trimmable for member in self.members)

    def trim(self, n: int) -> "CacheGroup":
        """The group with every member without its last `n` tokens.

        Raises:
            RequestError: A member is not trimmable, or holds fewer.
        """
        check_trim(self, n)
        return replace(self, members=tuple(member.trim(n) for member in self.members))

    def replaced(self, *members: Cache) -> "CacheGroup":
        """The group with new members, as many as before."""
        if len(members) != len(self.members):
            raise ValueError(f"{len(members)} members for {len(self.members)}")
        return replace(self, members=members)
