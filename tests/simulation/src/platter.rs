//! A disk that loses unsynced writes, tears writes, flips bits, returns errors and fills up.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_node::disk::io::{Direction, DiskDevice, Finished, Memory, Transfer};

/// The content of a disk. It outlives the processes that use it.
#[derive(Clone)]
pub(crate) struct Platter(Arc<Mutex<State>>);

pub(crate) struct State {
    /// The pages that a reader sees; a page that is missing here is all zeros.
    seen: BTreeMap<u64, Page>,
    /// The pages that would survive a power loss now.
    stable: BTreeMap<u64, Page>,
    /// Pages that were written since the last sync.
    unsynced: Vec<(u64, Page)>,
    random: fastrand::Rng,
    /// Number of failing reads in a thousand.
    pub(crate) failing_reads: u32,
    /// Whether nothing can be written.
    pub(crate) is_full: bool,
    /// Whether syncs fail.
    pub(crate) fails_syncs: bool,
    /// The number of the open handle: handles of ended processes write nothing.
    owner: u64,
    /// Bits that were flipped.
    pub(crate) flips: u64,
}

type Page = Arc<[u8; PAGE]>;

struct Way {
    platter: Platter,
    owner: u64,
    finished: Vec<Finished>,
}

impl Platter {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            seen: BTreeMap::new(),
            stable: BTreeMap::new(),
            unsynced: Vec::new(),
            random: fastrand::Rng::with_seed(seed),
            failing_reads: 0,
            is_full: false,
            fails_syncs: false,
            owner: 0,
            flips: 0,
        })))
    }

    pub(crate) fn device(&self) -> Box<dyn DiskDevice> {
        let mut state = self.state();
        state.owner += 1;
        Box::new(Way { platter: self.clone(), owner: state.owner, finished: Vec::new() })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loses power: each page that was written since the last sync is there, is missing, or is there in part.
    pub(crate) fn lose_power(&self) {
        let state = &mut *self.state();
        state.owner += 1;
        for (number, page) in std::mem::take(&mut state.unsynced) {
            let kind = state.random.u8(..4);
            let first = state.random.usize(..=PAGE / SECTOR);
            let before = state.stable.get(&number).cloned().unwrap_or_else(|| Arc::new([0; PAGE]));
            let mut torn = *before;
            for sector in 0..PAGE / SECTOR {
                let lands = match kind {
                    0 => true,
                    1 => false,
                    2 => sector < first,
                    _ => state.random.bool(),
                };
                if lands {
                    let bytes = sector * SECTOR..(sector + 1) * SECTOR;
                    torn[bytes.clone()].copy_from_slice(&page[bytes]);
                }
            }
            state.stable.insert(number, Arc::new(torn));
        }
        state.seen = state.stable.clone();
    }

    /// Flips a bit of a page that is not empty, permanently.
    pub(crate) fn flip(&self) {
        let state = &mut *self.state();
        let pages: BTreeSet<u64> = state.stable.keys().copied().collect();
        let pages: Vec<u64> = pages.into_iter().collect();
        if pages.is_empty() {
            return;
        }
        let number = pages[state.random.usize(..pages.len())];
        let (byte, bit) = (state.random.usize(..PAGE), state.random.u32(..8));
        for pages in [&mut state.seen, &mut state.stable] {
            if let Some(page) = pages.get_mut(&number) {
                Arc::make_mut(page)[byte] ^= 1 << bit;
            }
        }
        state.flips += 1;
    }

    /// Replaces the disk by an empty one.
    pub(crate) fn replace(&self) {
        let state = &mut *self.state();
        state.owner += 1;
        state.seen.clear();
        state.stable.clear();
        state.unsynced.clear();
    }
}

impl State {
    fn transfer(&mut self, transfer: &mut Transfer) -> io::Result<()> {
        let (first, pages) = (transfer.offset / PAGE as u64, transfer.bytes / PAGE);
        match transfer.direction {
            Direction::Read => {
                if self.failing_reads > 0 && self.random.u32(..1_000) < self.failing_reads {
                    return Err(io::Error::other("the disk cannot read this"));
                }
                for at in 0..pages {
                    let page = self.seen.get(&(first + at as u64));
                    let bytes = page.map_or(&[0; PAGE], |page| page.as_ref());
                    match &mut transfer.memory {
                        Memory::Buffer(buffer) => {
                            buffer.bytes_mut()[at * PAGE..][..PAGE].copy_from_slice(bytes)
                        }
                        Memory::Place(memory, start) => {
                            memory.copy_in(*start + (at * PAGE) as u64, bytes).map_err(io::Error::other)?;
                        }
                    }
                }
            }
            Direction::Write => {
                if self.is_full {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                for at in 0..pages {
                    let mut page = [0; PAGE];
                    match &transfer.memory {
                        Memory::Buffer(buffer) => page.copy_from_slice(&buffer.bytes()[at * PAGE..][..PAGE]),
                        Memory::Place(memory, start) => {
                            memory
                                .copy_out(*start + (at * PAGE) as u64, &mut page)
                                .map_err(io::Error::other)?;
                        }
                    }
                    let (number, page) = (first + at as u64, Arc::new(page));
                    self.seen.insert(number, Arc::clone(&page));
                    self.unsynced.push((number, page));
                }
            }
        }
        Ok(())
    }
}

impl DiskDevice for Way {
    fn buffers(&mut self, _: usize, _: usize) -> io::Result<Vec<larder_node::disk::io::Buffer>> {
        Ok(Vec::new())
    }

    fn start(&mut self, mut transfer: Transfer) {
        let mut state = self.platter.state();
        let result = match state.owner == self.owner {
            true => state.transfer(&mut transfer),
            false => Err(io::Error::other("this process has the disk no more")),
        };
        drop(state);
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
        let state = &mut *self.platter.state();
        if state.owner != self.owner || state.fails_syncs {
            return Err(io::Error::other("the disk does not sync"));
        }
        for (number, page) in state.unsynced.drain(..) {
            state.stable.insert(number, page);
        }
        Ok(())
    }

    fn look(&self) -> io::Result<()> {
        Ok(())
    }
}

const PAGE: usize = 4_096;
const SECTOR: usize = 512;
