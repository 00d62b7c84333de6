//! A device that loses power, tears and damages its contents, cannot read some pages, fails, fills up, and is slow.

use std::collections::BTreeSet;
use std::io;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::disk::io::{Direction, DiskDevice, Finished, Memory, Transfer};

/// The contents of the device. They outlive the volumes that use them.
#[derive(Clone)]
pub(super) struct Platter(Arc<Mutex<State>>);

pub(super) struct State {
    /// The bytes that a reader sees.
    pub(super) seen: Vec<u8>,
    /// The bytes that are left if power is lost now.
    stable: Vec<u8>,
    /// Writes since the last sync.
    unsynced: Vec<(usize, Vec<u8>)>,
    random: fastrand::Rng,
    /// Number of operations that still succeed before all fail, and their error.
    pub(super) fails: Option<(u64, i32)>,
    /// Pages, by their number, that cannot be read until they are written.
    pub(super) unreadable: BTreeSet<usize>,
    /// Reads so far that failed.
    pub(super) failed_reads: u64,
    /// Operations so far.
    pub(super) operations: u64,
    /// Each sync waits for a message.
    pub(super) gate: Option<Receiver<()>>,
}

/// One volume's access to the platter.
struct Way {
    platter: Platter,
    finished: Vec<Finished>,
}

impl Platter {
    pub(super) fn new(bytes: u64, seed: u64) -> Self {
        let bytes = vec![0; bytes as usize];
        Self(Arc::new(Mutex::new(State {
            seen: bytes.clone(),
            stable: bytes,
            unsynced: Vec::new(),
            random: fastrand::Rng::with_seed(seed),
            fails: None,
            unreadable: BTreeSet::new(),
            failed_reads: 0,
            operations: 0,
            gate: None,
        })))
    }

    pub(super) fn device(&self) -> Box<dyn DiskDevice> {
        Box::new(Way { platter: self.clone(), finished: Vec::new() })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Loses power: each write since the last sync keeps all, none, its first, or some of its sectors.
    pub(super) fn lose_power(&self) {
        let state = &mut *self.state();
        for (offset, bytes) in std::mem::take(&mut state.unsynced) {
            let sectors = bytes.len() / SECTOR;
            let kind = state.random.u8(..4);
            let first = state.random.usize(..=sectors);
            for sector in 0..sectors {
                let lands = match kind {
                    0 => true,
                    1 => false,
                    2 => sector < first,
                    _ => state.random.bool(),
                };
                if lands {
                    let from = sector * SECTOR;
                    state.stable[offset + from..][..SECTOR].copy_from_slice(&bytes[from..][..SECTOR]);
                }
            }
        }
        state.seen = state.stable.clone();
        state.fails = None;
    }

    /// Makes the page at `offset` unreadable until it is written.
    pub(super) fn lose_page(&self, offset: u64) {
        self.state().unreadable.insert(offset as usize / PAGE);
    }

    /// Flips a bit, for good.
    pub(super) fn flip(&self, offset: u64, bit: u8) {
        let state = &mut *self.state();
        state.seen[offset as usize] ^= 1 << bit;
        state.stable[offset as usize] ^= 1 << bit;
    }
}

impl State {
    fn operation(&mut self) -> io::Result<()> {
        self.operations += 1;
        match self.fails {
            Some((left, error)) if self.operations > left => Err(io::Error::from_raw_os_error(error)),
            _ => Ok(()),
        }
    }

    fn can_read(&self, offset: usize, bytes: usize) -> io::Result<()> {
        match self.unreadable.range(offset / PAGE..(offset + bytes).div_ceil(PAGE)).next() {
            Some(_) => Err(io::Error::from_raw_os_error(libc::EIO)),
            None => Ok(()),
        }
    }

    fn transfer(&mut self, transfer: &mut Transfer) -> io::Result<()> {
        let (offset, bytes) = (transfer.offset as usize, transfer.bytes);
        assert!(offset.is_multiple_of(4096) && bytes.is_multiple_of(4096), "O_DIRECT needs whole pages");
        match transfer.direction {
            Direction::Read => {
                let read = self.operation().and_then(|()| self.can_read(offset, bytes));
                self.failed_reads += u64::from(read.is_err());
                read?;
                match &mut transfer.memory {
                    Memory::Buffer(buffer) => {
                        buffer.bytes_mut()[..bytes].copy_from_slice(&self.seen[offset..][..bytes]);
                    }
                    Memory::Place(memory, at) => memory.copy_in(*at, &self.seen[offset..][..bytes]).unwrap(),
                }
            }
            Direction::Write => {
                let mut written = vec![0; bytes];
                match &transfer.memory {
                    Memory::Buffer(buffer) => written.copy_from_slice(&buffer.bytes()[..bytes]),
                    Memory::Place(memory, at) => memory.copy_out(*at, &mut written).unwrap(),
                }
                // A write that fails may have reached the platter in part.
                self.unsynced.push((offset, written.clone()));
                self.operation()?;
                self.unreadable.retain(|page| !(offset..offset + bytes).contains(&(page * PAGE)));
                self.seen[offset..][..bytes].copy_from_slice(&written);
            }
        }
        Ok(())
    }
}

impl DiskDevice for Way {
    fn start(&mut self, mut transfer: Transfer) {
        let result = self.platter.state().transfer(&mut transfer);
        self.finished.push(Finished { tag: transfer.tag, memory: transfer.memory, result });
    }

    fn wait(&mut self) -> Option<Finished> {
        let which = match self.finished.len() {
            0 => return None,
            count => self.platter.state().random.usize(..count),
        };
        Some(self.finished.swap_remove(which))
    }

    fn sync(&mut self) -> io::Result<()> {
        let gate = self.platter.state().gate.take();
        if let Some(gate) = gate {
            // The holder of the other end lets the sync go by dropping that end.
            let _ = gate.recv();
            self.platter.state().gate = Some(gate);
        }
        let state = &mut *self.platter.state();
        state.operation()?;
        for (offset, bytes) in state.unsynced.drain(..) {
            state.stable[offset..][..bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn look(&self) -> io::Result<()> {
        Ok(())
    }
}

const SECTOR: usize = 512;
const PAGE: usize = 4096;
