"""Operations of many workers over a tree of connections."""
