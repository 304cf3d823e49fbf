from tests.support.worlds import mortal, world

__all__ = ["mortal", "world"]
