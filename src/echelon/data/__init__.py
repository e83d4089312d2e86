"""Who reads what: the order of samples, and samples that depend on nothing but the seed, the epoch and the id."""

from echelon.data.columns import Columns
from echelon.data.order import Order
from echelon.data.reader import Reader
from echelon.data.stream import Shuffled, Straight

__all__ = ["Columns", "Order", "Reader", "Shuffled", "Straight"]
