//! Blocks that may be read.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use larder_protocol::ChunkHash;
use larder_protocol::handoff::LayersSum;
use larder_protocol::session::{Leased, Request};

use crate::error::{Damaged, SessionError};
use crate::extents::Placed;
use crate::link::{Link, MappedFrom};
use crate::lock;
use crate::namespace::Namespace;
use crate::options::threads_for;
use crate::verify::{Proofs, Reading};
use larder_ipc::Mapping;

/// The right to read the first [`LeaseGuard::chunks`] chunks of a chain; a miss has 0 chunks. While the guard lives, the node
/// keeps the chunks in place.
///
/// Every pool can be restored at the end of these chunks. Blocks that the restored pools do not need, such as the recurrent state
/// after any chunk but the last, may not be read: see [`LeaseGuard::has_block`].
///
/// Blocks are verified when they are read, as the session's options say. A block that has other bytes than were committed under
/// its name is [`Damaged`], however often it is read: treat its chunk as missing. The session tells the node. Layers of a
/// followed chunk that have not come are [`Damaged`] too.
///
/// Dropping the guard gives the lease back at once, without blocking, from any thread.
pub struct LeaseGuard {
    namespace: Namespace,
    /// The lease's number; 0 if nothing is leased.
    lease: u64,
    chunks: usize,
    /// For a follow: the number of layers of each chunk that have come.
    come: Option<Mutex<Box<[u32]>>>,
    placed: Placed,
    proofs: Proofs,
    /// Dropped last.
    link: MappedFrom,
}

impl LeaseGuard {
    /// The lease of a prefix of the requested chunks, `asked`.
    pub(crate) fn accept(
        link: &Arc<Link>,
        namespace: Namespace,
        asked: &[ChunkHash],
        mut leased: Leased,
        descriptors: &[OwnedFd],
    ) -> Result<Self, SessionError> {
        let sums = std::mem::take(&mut leased.checksums);
        let prove = |hashes: &[ChunkHash], places| Ok((Proofs::of_lease(link, hashes, places, sums)?, None));
        Self::accept_with(link, namespace, asked, leased, descriptors, prove)
    }

    /// The lease of followed chunks, whose layers have checksums of their own.
    pub(crate) fn accept_followed(
        link: &Arc<Link>,
        namespace: Namespace,
        asked: &[ChunkHash],
        leased: Leased,
        descriptors: &[OwnedFd],
    ) -> Result<Self, SessionError> {
        let prove = |hashes: &[ChunkHash], places| {
            let nothing = vec![0; hashes.len()].into_boxed_slice();
            Ok((Proofs::of_follow(link, hashes, places), Some(Mutex::new(nothing))))
        };
        Self::accept_with(link, namespace, asked, leased, descriptors, prove)
    }

    fn accept_with(
        link: &Arc<Link>,
        namespace: Namespace,
        asked: &[ChunkHash],
        leased: Leased,
        descriptors: &[OwnedFd],
        prove: impl FnOnce(&[ChunkHash], usize) -> Result<(Proofs, Option<Mutex<Box<[u32]>>>), SessionError>,
    ) -> Result<Self, SessionError> {
        let chunks = leased.chunks as usize;
        if chunks > asked.len() || (chunks > 0 && leased.lease == 0) {
            return Err(SessionError::wrong_answer("a lease covers chunks that were asked for"));
        }
        let mut extents = lock(&link.extents);
        extents.add(&leased.extents, descriptors)?;
        let rules = *namespace.rules();
        let pools = |position| rules.needed(position, chunks);
        let placed = extents.place(&namespace, chunks, pools, leased.places)?;
        drop(extents);
        let (proofs, come) = prove(&asked[..chunks], placed.len())?;
        Ok(Self {
            link: MappedFrom(Arc::clone(link)),
            namespace,
            lease: leased.lease,
            chunks,
            come,
            placed,
            proofs,
        })
    }

    /// A lease of no chunks.
    pub(crate) fn nothing(link: &Arc<Link>, namespace: Namespace) -> Result<Self, SessionError> {
        let (places, checksums, extents) = (Vec::new(), Vec::new(), Vec::new());
        Self::accept(link, namespace, &[], Leased { lease: 0, chunks: 0, places, checksums, extents }, &[])
    }

    /// The number of its session.
    pub(crate) fn session(&self) -> u64 {
        self.link.number
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
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

    /// Whether block `block` of the chunk at `position` may be read. If the namespace needs all pools of every chunk, all blocks
    /// may be read.
    ///
    /// # Panics
    /// Panics if there is no such chunk or block.
    #[must_use]
    pub fn has_block(&self, position: usize, block: usize) -> bool {
        self.find(position, block).is_some()
    }

    /// Copies block `block` of the chunk at `position` into `out`, and counts its bytes. The copy is verified, not the block.
    ///
    /// # Errors
    /// [`Damaged`]: the bytes in `out` are of no use.
    ///
    /// # Panics
    /// Panics if there is no such block, it may not be read, or `out` has another size than the block.
    pub fn copy_block(&self, position: usize, block: usize, out: &mut [u8]) -> Result<(), Damaged> {
        assert_eq!(
            out.len() as u64,
            self.namespace.block_bytes(block),
            "`out` must have the size of the block"
        );
        let reading = self.reading(position, block, &(0..out.len() as u64))?;
        self.link.traffic.count_read(out.len() as u64);
        self.proofs.copy_block(reading, out)
    }

    /// Copies `out.len()` bytes of block `block` of the chunk at `position` into `out`, beginning at `offset` bytes from the
    /// block's start, and counts them. The block is verified when any part of it is read for the first time.
    ///
    /// # Errors
    /// [`Damaged`]: nothing is copied.
    ///
    /// # Panics
    /// Panics if there is no such block, it may not be read, or it has too few bytes.
    pub fn copy_range(
        &self,
        position: usize,
        block: usize,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), Damaged> {
        let bytes = self.namespace.block_bytes(block);
        let end = offset.checked_add(out.len() as u64).filter(|&end| end <= bytes);
        let Some(end) = end else { panic!("{} bytes at {offset} are beyond a block of {bytes}", out.len()) };
        let reading = self.reading(position, block, &(offset..end))?;
        self.proofs.check(reading, &(offset..end))?;
        reading.mapping.copy_to(reading.offset + offset, out);
        self.link.traffic.count_read(out.len() as u64);
        Ok(())
    }

    /// The address and size of block `block` of the chunk at `position`, for a copy by a device; counts the block as read. The
    /// memory is read-only, and valid until the lease is given back: keep the lease until the device has completed the copy.
    /// Verifies the layers of a followed chunk that are in place now.
    ///
    /// # Errors
    /// [`Damaged`]: the block has wrong bytes.
    ///
    /// # Panics
    /// Panics if there is no such block, or it may not be read.
    pub fn block_ptr(&self, position: usize, block: usize) -> Result<(*const u8, usize), Damaged> {
        let bytes = self.namespace.block_bytes(block);
        let reading = self.reading(position, block, &(0..0))?;
        self.proofs.check(reading, &(0..bytes))?;
        self.link.traffic.count_read(bytes);
        Ok((reading.mapping.as_ptr().wrapping_add(reading.offset as usize).cast_const(), bytes as usize))
    }

    /// Verifies bytes of a block in place, as far as the session's options say so and they were not verified before.
    pub(crate) fn verify_bytes(
        &self,
        position: usize,
        block: usize,
        bytes: &Range<u64>,
    ) -> Result<(), Damaged> {
        self.proofs.check(self.reading(position, block, bytes)?, bytes)
    }

    /// Whether reading the block now verifies it, or finds that it is damaged.
    ///
    /// # Panics
    /// Panics if there is no such block, or it may not be read.
    pub(crate) fn is_verified_now(&self, position: usize, block: usize) -> bool {
        let reading = self.reading(position, block, &(0..0));
        reading.and_then(|reading| self.proofs.must_check(&reading)).unwrap_or(true)
    }

    /// Threads that share a copy of so many bytes: at least one.
    #[must_use]
    pub fn copy_threads(&self, bytes: u64) -> usize {
        threads_for(self.link.copy_threads, bytes)
    }

    /// Notes how many layers of the first followed chunks have come. The checksums of layers are noted before the layers count.
    /// Layers that have come stay, even if the rest does not come.
    pub(crate) fn heard(
        &self,
        (chunks, layers): (usize, u32),
        sums: Vec<LayersSum>,
        whole: Vec<u64>,
    ) -> Result<(), SessionError> {
        self.proofs.add(sums, whole)?;
        if let Some(come) = &self.come {
            lock(come).iter_mut().take(chunks).for_each(|come| *come = layers.max(*come));
        }
        Ok(())
    }

    /// The lease's number at the node; 0 if nothing is leased.
    pub(crate) fn number(&self) -> u64 {
        self.lease
    }

    /// Gives the lease back. The same as dropping it.
    pub fn release(self) {}

    /// The address of block `block` of the chunk at `position`, for a device; counts `bytes` of it as read.
    ///
    /// # Panics
    /// Panics if there is no such block, or it may not be read.
    pub(crate) fn block_memory(&self, position: usize, block: usize, bytes: u64) -> (Arc<Mapping>, u64) {
        let (mapping, offset) = self.place(position, block);
        self.link.traffic.count_read(bytes);
        (Arc::clone(mapping), offset)
    }

    fn place(&self, position: usize, block: usize) -> (&Arc<Mapping>, u64) {
        self.placed.at(self.index(position, block))
    }

    /// Prepares to read these bytes of a block.
    ///
    /// # Errors
    /// [`Damaged`]: the bytes have not come.
    fn reading(&self, position: usize, block: usize, bytes: &Range<u64>) -> Result<Reading<'_>, Damaged> {
        let index = self.index(position, block);
        if let Some(come) = &self.come {
            let layers = bytes.end.div_ceil(self.namespace.layer_bytes(block).max(1));
            if layers.max(1) > lock(come)[position].into() {
                return Err(self.proofs.missing(position, block));
            }
        }
        let (mapping, offset) = self.placed.at(index);
        let (link, namespace, lease) = (&*self.link, &self.namespace, self.lease);
        Ok(Reading { link, namespace, lease, position, block, index, mapping, offset })
    }

    fn index(&self, position: usize, block: usize) -> usize {
        self.find(position, block).unwrap_or_else(|| {
            panic!("restoring {} chunks needs no block {block} of the one at {position}", self.chunks)
        })
    }

    fn find(&self, position: usize, block: usize) -> Option<usize> {
        assert!(position < self.chunks, "{} chunks are leased, there is none at {position}", self.chunks);
        let blocks = self.namespace.blocks_per_chunk();
        assert!(block < blocks, "a chunk has {blocks} blocks, not {block}");
        self.placed.index(&self.namespace, position, block)
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        if self.lease != 0 {
            // The release is a message of its own: sending it with the session's next request would save 4 us of some 44 on a
            // lease.
            self.link.post(&Request::Release(self.lease));
        }
    }
}
