//! Memory for transfers: aligned for O_DIRECT, on huge pages if the kernel has any.
//!
//! Drives take a bounded number of pieces of memory per request. With pages of 4 KiB, requests are small: on a virtual drive
//! that allows 254 pieces, blocks of 4 MiB moved at a third of the rate of huge pages. io_uring registers the buffers at the
//! start, if memory may be locked, so their pages are looked up once.

use std::io;

use memmap2::{Advice, MmapMut};

/// Memory that begins at a huge page's boundary. It is zeros at first.
#[derive(Debug)]
pub struct Buffer {
    /// Larger than the buffer by a huge page.
    mapping: MmapMut,
    start: usize,
    bytes: usize,
    /// The number under which a device knows the buffer.
    pub(super) number: Option<u16>,
}

impl Buffer {
    /// A buffer of new memory from the system.
    ///
    /// # Errors
    /// Fails if the system gives no memory.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let mapping = MmapMut::map_anon(bytes + HUGE_PAGE_BYTES)?;
        let start = mapping.as_ptr().align_offset(HUGE_PAGE_BYTES);
        if let Err(error) = mapping.advise(Advice::HugePage) {
            tracing::debug!(%error, "no huge pages for the disk tier's buffers");
        }
        Ok(Self { mapping, start, bytes, number: None })
    }

    /// The buffer's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.mapping[self.start..][..self.bytes]
    }

    /// The buffer's bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.mapping[self.start..][..self.bytes]
    }
}

const HUGE_PAGE_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_that_the_system_has_no_memory_for_is_an_error() {
        assert!(Buffer::new(1 << 60).is_err());
    }

    #[test]
    fn a_buffer_is_aligned_zeroed_and_its_own() {
        let (mut one, two) = (Buffer::new(8192).unwrap(), Buffer::new(3 << 20).unwrap());
        assert!(one.bytes().as_ptr().addr().is_multiple_of(HUGE_PAGE_BYTES));
        one.bytes_mut().fill(7);
        assert!(two.bytes().iter().all(|&byte| byte == 0) && two.bytes().len() == 3 << 20);
        assert!(one.bytes().iter().all(|&byte| byte == 7) && one.bytes().len() == 8192);
    }
}
