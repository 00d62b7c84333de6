//! The device over io_uring.
#![expect(unsafe_code, reason = "the kernel uses memory after the call that named it returned")]

use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, types};

use super::{Buffer, Direction, DiskDevice, DiskFile, Finished, Memory, Transfer};
use crate::disk::format::PAGE_BYTES;

/// Transfers that are under way at the same time.
pub struct Ring {
    ring: IoUring,
    file: Arc<DiskFile>,
    /// Running transfers, by the number that the kernel was given. Their memory stays here, untouched, until the kernel reports
    /// their completion.
    flying: Vec<Option<Transfer>>,
    /// Finished transfers that the kernel did not take. This thread carried them out.
    refused: Vec<Finished>,
    /// Addresses of the buffers that the kernel knows, by their numbers: it looks up their pages once, not with each transfer.
    registered: Vec<usize>,
}

impl Ring {
    /// Makes a device over `file`, and tries it with one read.
    ///
    /// # Errors
    /// Fails if the kernel or a filter of system calls forbids io_uring, or if an operation is missing.
    pub fn new(file: Arc<DiskFile>) -> io::Result<Self> {
        let flying = (0..ENTRIES).map(|_| None).collect();
        let (refused, registered) = (Vec::new(), Vec::new());
        let mut ring = Self { ring: Self::set_up()?, file, flying, refused, registered };
        ring.try_read()?;
        Ok(ring)
    }

    /// Checks that io_uring is allowed here, with all operations that are needed.
    ///
    /// # Errors
    /// Fails if io_uring is forbidden, or if an operation is missing.
    pub fn probe() -> io::Result<()> {
        Self::set_up().map(drop)
    }

    fn set_up() -> io::Result<IoUring> {
        let ring = IoUring::new(ENTRIES)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let has_all =
            [opcode::Read::CODE, opcode::Write::CODE].into_iter().all(|code| probe.is_supported(code));
        if has_all { Ok(ring) } else { Err(io::ErrorKind::Unsupported.into()) }
    }

    fn register(&mut self, buffers: &mut [Buffer]) -> io::Result<()> {
        let mut memory = Vec::with_capacity(buffers.len());
        for buffer in &mut *buffers {
            let bytes = buffer.bytes_mut();
            memory.push(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() });
        }
        // SAFETY: the kernel keeps the registered pages until the ring is gone. A transfer names a registered buffer only if
        // number and address match. No other buffer has both while the registered buffer lives, so the transfer's memory is the
        // registered pages.
        unsafe { self.ring.submitter().register_buffers(&memory)? };
        for (number, buffer) in (0..).zip(buffers) {
            buffer.number = Some(number);
            self.registered.push(buffer.bytes().as_ptr().addr());
        }
        Ok(())
    }

    /// The buffer's number, if the kernel knows the buffer.
    fn number_of(&self, memory: &Memory) -> Option<u16> {
        let Memory::Buffer(buffer) = memory else { return None };
        let number = buffer.number?;
        (self.registered.get(usize::from(number)) == Some(&buffer.bytes().as_ptr().addr())).then_some(number)
    }

    fn try_read(&mut self) -> io::Result<()> {
        let bytes = PAGE_BYTES as usize;
        if self.file.bytes()? < PAGE_BYTES {
            return Ok(());
        }
        self.start(Transfer {
            tag: 0,
            direction: Direction::Read,
            offset: 0,
            memory: Memory::Buffer(Buffer::new(bytes)?),
            bytes,
        });
        let Some(Finished { result, .. }) = self.wait() else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        // If the drive cannot read the page, the ring works nevertheless.
        result.or_else(|error| if error.raw_os_error() == Some(libc::EIO) { Ok(()) } else { Err(error) })
    }

    /// Hands a transfer to the kernel. Returns the transfer if the kernel takes no more.
    fn submit(&mut self, mut transfer: Transfer) -> Result<(), Transfer> {
        let Some(number) = self.flying.iter().position(Option::is_none) else { return Err(transfer) };
        let file = types::Fd(self.file.file.as_raw_fd());
        let bytes = transfer.bytes as u32;
        let known = self.number_of(&transfer.memory);
        // Either way the bytes are known to lie within the memory.
        let memory = match &mut transfer.memory {
            Memory::Buffer(buffer) => buffer.bytes_mut()[..transfer.bytes].as_mut_ptr(),
            Memory::Place(memory, offset) => match memory.address_of(*offset, u64::from(bytes)) {
                Ok(address) => address,
                Err(_) => return Err(transfer),
            },
        };
        let (at, constant) = (transfer.offset, memory.cast_const());
        let entry = match (transfer.direction, known) {
            (Direction::Read, None) => opcode::Read::new(file, memory, bytes).offset(at).build(),
            (Direction::Read, Some(number)) => {
                opcode::ReadFixed::new(file, memory, bytes, number).offset(at).build()
            }
            (Direction::Write, None) => opcode::Write::new(file, constant, bytes).offset(at).build(),
            (Direction::Write, Some(number)) => {
                opcode::WriteFixed::new(file, constant, bytes, number).offset(at).build()
            }
        };
        self.flying[number] = Some(transfer);
        let entry = entry.user_data(number as u64);
        // SAFETY: `flying` has the memory from here until the kernel's completion with this number is seen, and dropping the
        // ring waits for that. The memory is a buffer's own, which does not move, or an extent, which stays mapped as long as
        // it is held. The place in the extent belongs to the order that named it; the volume answers no order while its
        // transfers are under way. No reference to the memory exists. The file is open as long as the ring.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            return self.flying[number].take().map_or(Ok(()), Err);
        }
        if let Err(error) = self.ring.submit() {
            // The entry may still be in the queue: the transfer stays, and `wait` submits again.
            tracing::debug!(%error, "io_uring takes a transfer later");
        }
        Ok(())
    }

    /// The next completion: a transfer's number, and bytes or a negative error number.
    fn completion(&mut self) -> (usize, i32) {
        loop {
            if let Some(entry) = self.ring.completion().next() {
                return (entry.user_data() as usize, entry.result());
            }
            if let Err(error) = self.ring.submit_and_wait(1)
                && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
            {
                // Without a completion the kernel keeps the buffers forever, and this thread cannot go on.
                tracing::error!(%error, "io_uring does not answer");
                std::thread::yield_now();
            }
        }
    }
}

impl DiskDevice for Ring {
    fn buffers(&mut self, count: usize, bytes: usize) -> io::Result<Vec<Buffer>> {
        let buffers: io::Result<Vec<Buffer>> =
            std::iter::repeat_with(|| Buffer::new(bytes)).take(count).collect();
        let mut buffers = buffers?;
        if self.registered.is_empty()
            && let Err(error) = self.register(&mut buffers)
        {
            tracing::info!(%error, "the disk tier's buffers are not locked in memory (RLIMIT_MEMLOCK): it takes more CPU");
        }
        Ok(buffers)
    }

    fn start(&mut self, transfer: Transfer) {
        if let Err(mut transfer) = self.submit(transfer) {
            let result = self.file.transfer(&mut transfer, 0);
            self.refused.push(Finished { tag: transfer.tag, memory: transfer.memory, result });
        }
    }

    fn wait(&mut self) -> Option<Finished> {
        if let Some(finished) = self.refused.pop() {
            return Some(finished);
        }
        if self.flying.iter().all(Option::is_none) {
            return None;
        }
        let (number, result) = self.completion();
        let mut transfer = self.flying.get_mut(number)?.take()?;
        let result = match usize::try_from(result) {
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
            Ok(bytes) if bytes == transfer.bytes => Ok(()),
            // A short transfer is no error; the rest is transferred here.
            Ok(bytes) => {
                let whole_pages = bytes - bytes % PAGE_BYTES as usize;
                self.file.transfer(&mut transfer, whole_pages)
            }
        };
        Some(Finished { tag: transfer.tag, memory: transfer.memory, result })
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync()
    }

    fn look(&self) -> io::Result<()> {
        self.file.look()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.wait().is_some() {}
    }
}

/// Limit of running transfers; the caller's thread carries out further transfers itself.
const ENTRIES: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1 << 16;

    /// A ring over a file of its own; `None` if io_uring is not allowed.
    fn ring() -> Option<(Ring, tempfile::TempDir)> {
        let folder = tempfile::tempdir().unwrap();
        let file = DiskFile::open(&folder.path().join("file")).unwrap();
        file.allocate(4 * BYTES as u64).unwrap();
        Some((Ring::new(Arc::new(file)).ok()?, folder))
    }

    fn transfer(ring: &mut Ring, direction: Direction, at: usize, buffer: Buffer) -> Buffer {
        let (memory, offset) = (Memory::Buffer(buffer), (at * BYTES) as u64);
        ring.start(Transfer { tag: 1, direction, offset, memory, bytes: BYTES });
        let Finished { memory: Memory::Buffer(buffer), result, .. } = ring.wait().unwrap() else {
            panic!("a buffer comes back");
        };
        result.unwrap();
        buffer
    }

    #[test]
    fn buffers_that_the_kernel_knows_and_others_carry_the_same_bytes() {
        let (Some((mut ring, _one)), Some((mut other, _two))) = (ring(), ring()) else { return };
        let known = ring.buffers(2, BYTES).unwrap();
        // Buffers of another ring have the same numbers, but this ring's kernel side does not know them.
        let buffers =
            known.into_iter().chain(other.buffers(1, BYTES).unwrap()).chain([Buffer::new(BYTES).unwrap()]);
        let mut written = Vec::new();
        for (at, mut buffer) in buffers.enumerate() {
            buffer.bytes_mut().fill(at as u8 + 1);
            written.push(transfer(&mut ring, Direction::Write, at, buffer));
        }
        // Each block is read into another buffer than it was written from.
        written.rotate_left(1);
        for (at, buffer) in written.into_iter().enumerate() {
            let read = transfer(&mut ring, Direction::Read, at, buffer);
            assert!(read.bytes().iter().all(|&byte| byte == at as u8 + 1), "block {at}");
        }
    }

    #[test]
    fn numbers_count_for_the_buffers_that_got_them_alone() {
        let (Some((mut ring, _one)), Some((mut other, _two))) = (ring(), ring()) else { return };
        let known = ring.buffers(1, BYTES).unwrap().remove(0);
        let others = other.buffers(1, BYTES).unwrap().remove(0);
        assert_eq!(known.number, others.number);
        let has_number = ring.registered.len() == 1;
        assert_eq!(ring.number_of(&Memory::Buffer(known)).is_some(), has_number);
        assert_eq!(ring.number_of(&Memory::Buffer(others)), None);
        assert_eq!(ring.number_of(&Memory::Buffer(Buffer::new(BYTES).unwrap())), None);
    }
}
