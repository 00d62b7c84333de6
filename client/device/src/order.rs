//! Orders to a device: merged copies over many chunks and layers.

use std::ops::Range;

use crate::layout::PagedLayout;

/// A piece of memory that a device knows: the arena, a pool of its own, a region of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// An engine's tensors that a device knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorsId(pub u32);

/// The number of an order; no two orders have the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OrderNumber(pub u64);

/// A place in a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionOffset {
    /// The region.
    pub region: RegionId,
    /// Bytes from its start on.
    pub offset: u64,
}

/// The direction of an order; each has a stream of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Into the engine's memory: from blocks to pages, from the host to the device.
    Load,
    /// From the engine's memory: from pages to blocks, from the device to the host.
    Save,
}

/// A number in a flag page, by which an engine's stream and a copy wait for each other.
///
/// A flag is reached when its word is at the value or less than 2^31 beyond it, so words may wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flag {
    /// The place of the word: a multiple of 4 in host memory.
    pub word: RegionOffset,
    /// The value that the word must have reached.
    pub value: u32,
}

/// A copy to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The direction.
    pub direction: Direction,
    /// The copies.
    pub work: Work,
    /// The order begins when this flag is reached: the engine's stream says that the pages are as they should be.
    pub after: Option<Flag>,
    /// The word is raised to `value` plus the number of layers that are done, so that the engine's stream can wait for each. A
    /// failed order raises it to the end: its waiters go on, and its completion says that nothing came.
    pub then: Option<Flag>,
}

/// The copies of an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Between pages and blocks.
    Pages {
        /// The tensors of the pages.
        tensors: TensorsId,
        /// All pages of all chunks.
        pages: Vec<PageCopy>,
        /// The layers.
        layers: Range<u32>,
        /// Whether each layer is reported as soon as it is done, first to last.
        by_layer: bool,
    },
    /// Whole blocks, between regions: from one tier to another.
    Blocks(Vec<BlockMove>),
}

/// The place of a page in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The start of its chunk's block.
    pub block: RegionOffset,
    /// Its number in the chunk.
    pub in_chunk: u32,
    /// Its number in the engine's memory.
    pub page: u32,
}

/// A block to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockMove {
    /// The block's place.
    pub from: RegionOffset,
    /// The target.
    pub to: RegionOffset,
    /// Its bytes.
    pub bytes: u64,
}

/// Why an order is refused. Nothing was begun.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// The order asks for nothing.
    #[error("an order copies at least one page or block")]
    Empty,
    /// Longer than [`MAX_COPIES`].
    #[error("an order of {0} copies is too long: {MAX_COPIES} at most")]
    TooLong(usize),
    /// No such tensors.
    #[error("there are no tensors {}", .0.0)]
    NoTensors(TensorsId),
    /// No such layers, or none at all.
    #[error("there are no layers {0:?}")]
    NoLayers(Range<u32>),
    /// No such page.
    #[error("there is no page {0}")]
    NoPage(u32),
    /// A place is beyond its region, in no region, or unaligned.
    #[error("a block of {bytes} bytes does not fit at {} of region {}", .place.offset, .place.region.0)]
    NoPlace {
        /// The place.
        place: RegionOffset,
        /// The block's size.
        bytes: u64,
    },
    /// A place may only be read.
    #[error("region {} may only be read", .0.0)]
    ReadOnly(RegionId),
    /// Two copies write to one place.
    #[error("two copies of an order write to one place")]
    Overlap,
}

impl Work {
    /// The number of layers that are reported.
    #[must_use]
    pub fn layers(&self) -> u32 {
        match self {
            Self::Pages { layers, .. } => layers.end.saturating_sub(layers.start),
            Self::Blocks(_) => 1,
        }
    }
}

impl Flag {
    /// Whether a word that says `found` has reached the flag.
    #[must_use]
    pub fn is_reached_by(self, found: u32) -> bool {
        found.wrapping_sub(self.value).cast_signed() >= 0
    }

    /// The flag after this many layers.
    #[must_use]
    pub fn raised(self, layers: u32) -> Self {
        Self { value: self.value.wrapping_add(layers), ..self }
    }
}

/// The known places, against which an order is checked.
pub(crate) trait Places {
    /// Bytes of a region, and whether it may be written; `None` if there is none.
    fn region(&self, region: RegionId) -> Option<(u64, bool)>;
    /// The layout of tensors; `None` if there are none.
    fn layout(&self, tensors: TensorsId) -> Option<&PagedLayout>;
    /// Whether a region is host memory, which can hold flags.
    fn is_host(&self, region: RegionId) -> bool;
}

impl Order {
    /// Checks that every byte that the order would touch is where it should be.
    pub(crate) fn check(&self, places: &impl Places) -> Result<(), OrderError> {
        for flag in [self.after, self.then].into_iter().flatten() {
            check_place(places, flag.word, 4, 4, self.then == Some(flag))?;
            if !places.is_host(flag.word.region) {
                return Err(OrderError::NoPlace { place: flag.word, bytes: 4 });
            }
        }
        match &self.work {
            Work::Pages { tensors, pages, layers, .. } => {
                let layout = places.layout(*tensors).ok_or(OrderError::NoTensors(*tensors))?;
                check_length(pages.len())?;
                if layers.is_empty() || layers.end > layout.layers() {
                    return Err(OrderError::NoLayers(layers.clone()));
                }
                for copy in pages {
                    check_page(places, layout, copy, self.direction)?;
                }
                self.check_targets(pages, layout.block_bytes())
            }
            Work::Blocks(moves) => {
                check_length(moves.len())?;
                for BlockMove { from, to, bytes } in moves {
                    check_place(places, *from, *bytes, BLOCK_ALIGNMENT, false)?;
                    check_place(places, *to, *bytes, BLOCK_ALIGNMENT, true)?;
                }
                let targets = moves.iter().map(|copy| (copy.to.region, copy.to.offset, copy.bytes));
                check_apart(targets.collect())
            }
        }
    }

    /// Checks that no two copies write to one page, to one place in a block, or to overlapping blocks.
    fn check_targets(&self, pages: &[PageCopy], block_bytes: u64) -> Result<(), OrderError> {
        if self.direction == Direction::Load {
            let mut targets: Vec<u32> = pages.iter().map(|copy| copy.page).collect();
            targets.sort_unstable();
            return if targets.is_sorted_by(|a, b| a < b) { Ok(()) } else { Err(OrderError::Overlap) };
        }
        let mut targets: Vec<_> = pages.iter().map(|copy| (copy.block, copy.in_chunk)).collect();
        targets.sort_unstable();
        if !targets.is_sorted_by(|a, b| a < b) {
            return Err(OrderError::Overlap);
        }
        targets.dedup_by_key(|&mut (block, _)| block);
        check_apart(targets.iter().map(|(block, _)| (block.region, block.offset, block_bytes)).collect())
    }
}

fn check_length(copies: usize) -> Result<(), OrderError> {
    match copies {
        0 => Err(OrderError::Empty),
        copies if copies > MAX_COPIES => Err(OrderError::TooLong(copies)),
        _ => Ok(()),
    }
}

fn check_page(
    places: &impl Places,
    layout: &PagedLayout,
    copy: &PageCopy,
    direction: Direction,
) -> Result<(), OrderError> {
    if copy.page >= layout.spec().pages {
        return Err(OrderError::NoPage(copy.page));
    }
    if copy.in_chunk >= layout.spec().pages_per_chunk {
        return Err(OrderError::NoPage(copy.in_chunk));
    }
    check_place(places, copy.block, layout.block_bytes(), BLOCK_ALIGNMENT, direction == Direction::Save)
}

fn check_place(
    places: &impl Places,
    place: RegionOffset,
    bytes: u64,
    alignment: u64,
    is_written: bool,
) -> Result<(), OrderError> {
    let no_place = OrderError::NoPlace { place, bytes };
    let Some((size, is_writable)) = places.region(place.region) else { return Err(no_place) };
    let fits = place.offset.checked_add(bytes).is_some_and(|end| end <= size);
    if bytes == 0 || !fits || !place.offset.is_multiple_of(alignment) {
        return Err(no_place);
    }
    if is_written && !is_writable { Err(OrderError::ReadOnly(place.region)) } else { Ok(()) }
}

fn check_apart(mut targets: Vec<(RegionId, u64, u64)>) -> Result<(), OrderError> {
    targets.sort_unstable();
    let is_apart = |a: &(RegionId, u64, u64), b: &(RegionId, u64, u64)| a.0 != b.0 || a.1 + a.2 <= b.1;
    if targets.is_sorted_by(is_apart) { Ok(()) } else { Err(OrderError::Overlap) }
}

/// Pages or blocks of one order: its tables take 1.5 MiB.
pub const MAX_COPIES: usize = 65_536;

/// Kernels move 16 bytes at a time.
const BLOCK_ALIGNMENT: u64 = crate::layout::ALIGNMENT;
