//! Blocks that may be read.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use larder_protocol::session::{Leased, Request};

use crate::error::SessionError;
use crate::extents::Placed;
use crate::link::Link;
use crate::lock;
use crate::mapping::Mapping;
use crate::namespace::Namespace;

/// The right to read the first [`LeaseGuard::chunks`] chunks of a chain; 0 of them on a miss. While it lives the node
/// keeps them in place.
///
/// Every pool can be restored at their end. What that does not need, such as the recurrent state after any chunk but the
/// last, is not among the blocks that may be read: see [`LeaseGuard::has_block`].
///
/// Dropping it gives the lease back at once, without blocking, from any thread.
pub struct LeaseGuard {
    link: Arc<Link>,
    namespace: Namespace,
    /// 0 where nothing is leased.
    lease: u64,
    chunks: usize,
    placed: Placed,
}

impl LeaseGuard {
    pub(crate) fn accept(
        link: &Arc<Link>,
        namespace: Namespace,
        asked: usize,
        leased: Leased,
        descriptors: &[OwnedFd],
    ) -> Result<Self, SessionError> {
        let chunks = leased.chunks as usize;
        if chunks > asked || (chunks > 0 && leased.lease == 0) {
            return Err(SessionError::wrong_answer("a lease covers chunks that were asked for"));
        }
        let mut extents = lock(&link.extents);
        extents.add(&leased.extents, descriptors)?;
        let rules = *namespace.rules();
        let pools = |position| rules.needed(position, chunks);
        let placed = extents.place(&namespace, chunks, pools, leased.places)?;
        Ok(Self { link: Arc::clone(link), namespace, lease: leased.lease, chunks, placed })
    }

    /// A lease of no chunks.
    pub(crate) fn nothing(link: &Arc<Link>, namespace: Namespace) -> Result<Self, SessionError> {
        let nothing = Leased { lease: 0, chunks: 0, places: Vec::new(), extents: Vec::new() };
        Self::accept(link, namespace, 0, nothing, &[])
    }

    /// Chunks leased, from the chain's first on.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Blocks of each chunk: slices x pools, see [`Namespace`].
    #[must_use]
    pub fn blocks_per_chunk(&self) -> usize {
        self.namespace.blocks_per_chunk()
    }

    /// The namespace of the chunks.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Whether block `block` of the chunk at `position` may be read. In a namespace whose pools are all needed of every chunk,
    /// all may.
    ///
    /// # Panics
    /// Where there is no such chunk or block.
    #[must_use]
    pub fn has_block(&self, position: usize, block: usize) -> bool {
        self.find(position, block).is_some()
    }

    /// Copies block `block` of the chunk at `position` into `out`, and counts its bytes.
    ///
    /// # Panics
    /// Where there is no such block, it may not be read, or `out` has another size than it.
    pub fn copy_block(&self, position: usize, block: usize, out: &mut [u8]) {
        assert_eq!(
            out.len() as u64,
            self.namespace.block_bytes(block),
            "`out` must have the size of the block"
        );
        self.copy_range(position, block, 0, out);
    }

    /// Copies `out.len()` bytes of block `block` of the chunk at `position` into `out`, from `offset` bytes behind its start
    /// on, and counts them.
    ///
    /// # Panics
    /// Where there is no such block, it may not be read, or it ends before.
    pub fn copy_range(&self, position: usize, block: usize, offset: u64, out: &mut [u8]) {
        let bytes = self.namespace.block_bytes(block);
        let fits = offset.checked_add(out.len() as u64).is_some_and(|end| end <= bytes);
        assert!(fits, "{} bytes at {offset} are beyond a block of {bytes}", out.len());
        let (mapping, start) = self.place(position, block);
        mapping.copy_to(start + offset, out);
        self.link.traffic.count_read(out.len() as u64);
    }

    /// Where block `block` of the chunk at `position` stands, and its bytes, for a copy by a device; counts it as read.
    /// Read-only, and valid until the lease is given back: keep it until the device has completed the copy.
    ///
    /// # Panics
    /// Where there is no such block, or it may not be read.
    #[must_use]
    pub fn block_ptr(&self, position: usize, block: usize) -> (*const u8, usize) {
        let bytes = self.namespace.block_bytes(block);
        let (mapping, offset) = self.place(position, block);
        self.link.traffic.count_read(bytes);
        (mapping.as_ptr().wrapping_add(offset as usize).cast_const(), bytes as usize)
    }

    /// Its number at the node; 0 where nothing is leased.
    pub(crate) fn number(&self) -> u64 {
        self.lease
    }

    /// Gives the lease back. The same as dropping it.
    pub fn release(self) {}

    /// Where block `block` of the chunk at `position` stands, for a device; counts it as read where `bytes` of it are.
    ///
    /// # Panics
    /// Where there is no such block, or it may not be read.
    pub(crate) fn block_memory(&self, position: usize, block: usize, bytes: u64) -> (Arc<Mapping>, u64) {
        let (mapping, offset) = self.place(position, block);
        self.link.traffic.count_read(bytes);
        (Arc::clone(mapping), offset)
    }

    fn place(&self, position: usize, block: usize) -> (&Arc<Mapping>, u64) {
        self.find(position, block).unwrap_or_else(|| {
            panic!("restoring {} chunks needs no block {block} of the one at {position}", self.chunks)
        })
    }

    fn find(&self, position: usize, block: usize) -> Option<(&Arc<Mapping>, u64)> {
        assert!(position < self.chunks, "{} chunks are leased, there is none at {position}", self.chunks);
        let blocks = self.namespace.blocks_per_chunk();
        assert!(block < blocks, "a chunk has {blocks} blocks, not {block}");
        self.placed.block(&self.namespace, position, block)
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        if self.lease != 0 {
            self.link.post(&Request::Release(self.lease));
        }
    }
}
