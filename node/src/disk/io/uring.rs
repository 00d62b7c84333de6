//! The device over io_uring.
#![expect(unsafe_code, reason = "the kernel uses memory after the call that named it returned")]

use std::io;
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, types};

use super::{Buffer, Device, Direction, DiskFile, Finished, Memory, Transfer};
use crate::disk::format::PAGE_BYTES;

/// Transfers that are under way at the same time.
pub struct Ring {
    ring: IoUring,
    file: Arc<DiskFile>,
    /// What is under way, by the number that the kernel was given. Its memory stays here, untouched, until the kernel
    /// says that it is done with it.
    flying: Vec<Option<Transfer>>,
    /// Over before the kernel was asked.
    refused: Vec<Finished>,
}

impl Ring {
    /// A device over `file`, tried with one read.
    ///
    /// # Errors
    /// Where the kernel or its keeper does not allow io_uring, or it lacks an operation.
    pub fn new(file: Arc<DiskFile>) -> io::Result<Self> {
        let flying = (0..ENTRIES).map(|_| None).collect();
        let mut ring = Self { ring: Self::set_up()?, file, flying, refused: Vec::new() };
        ring.try_read()?;
        Ok(ring)
    }

    /// Whether the kernel and its keeper allow io_uring here, with all operations that are needed.
    ///
    /// # Errors
    /// Where they do not.
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

    fn try_read(&mut self) -> io::Result<()> {
        let bytes = PAGE_BYTES as usize;
        if self.file.bytes()? < PAGE_BYTES {
            return Ok(());
        }
        self.start(Transfer {
            tag: 0,
            direction: Direction::Read,
            offset: 0,
            memory: Memory::Buffer(Buffer::new(bytes)),
            bytes,
        });
        self.wait().map_or_else(|| Err(io::ErrorKind::Unsupported.into()), |finished| finished.result)
    }

    fn submit(&mut self, mut transfer: Transfer) -> Result<(), (Transfer, io::Error)> {
        let Some(number) = self.flying.iter().position(Option::is_none) else {
            return Err((transfer, io::ErrorKind::WouldBlock.into()));
        };
        let file = types::Fd(self.file.descriptor());
        let bytes = transfer.bytes as u32;
        // Either way the bytes are known to lie within the memory.
        let memory = match &mut transfer.memory {
            Memory::Buffer(buffer) => buffer.bytes_mut()[..transfer.bytes].as_mut_ptr(),
            Memory::Place(memory, offset) => match memory.address_of(*offset, u64::from(bytes)) {
                Ok(address) => address,
                Err(error) => return Err((transfer, io::Error::other(error))),
            },
        };
        let entry = match transfer.direction {
            Direction::Read => opcode::Read::new(file, memory, bytes).offset(transfer.offset).build(),
            Direction::Write => {
                opcode::Write::new(file, memory.cast_const(), bytes).offset(transfer.offset).build()
            }
        };
        self.flying[number] = Some(transfer);
        let entry = entry.user_data(number as u64);
        // SAFETY: `flying` has the memory from here until the kernel's completion with this number is seen, and dropping the
        // ring waits for that: a buffer's own, on the heap, or an extent, which stays mapped as long as it is held. The place
        // in the extent belongs to the order that named it; the volume answers no order while its transfers are under way.
        // No reference to it exists. The file is open as long as the ring.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        let submitted = match pushed {
            Ok(()) => self.submit_pushed(),
            Err(_) => {
                let transfer = self.flying[number].take();
                return transfer.map_or(Ok(()), |transfer| Err((transfer, io::ErrorKind::WouldBlock.into())));
            }
        };
        if let Err(error) = submitted {
            // The entry may still be in the queue: the transfer stays, and `wait` submits again.
            tracing::debug!(%error, "io_uring takes a transfer later");
        }
        Ok(())
    }

    fn submit_pushed(&self) -> io::Result<()> {
        self.ring.submit().map(drop)
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
                // Without a completion the buffers are the kernel's for ever: there is no way on for this thread.
                tracing::error!(%error, "io_uring does not answer");
                std::thread::yield_now();
            }
        }
    }
}

impl Device for Ring {
    fn start(&mut self, transfer: Transfer) {
        if let Err((mut transfer, _)) = self.submit(transfer) {
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
            // A short transfer is no error; its rest is carried out here.
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
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.wait().is_some() {}
    }
}

/// Transfers under way at most; more are carried out by whoever starts them.
const ENTRIES: u32 = 32;
