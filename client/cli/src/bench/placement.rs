//! Chooses the CPUs of the two sides of a bench. With the scheduler's choice, a round trip between two threads takes 13 µs on one
//! CPU or 45 µs on two.

use std::io;

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A CPU for the engine, and one for its answerer: a node or a yardstick's thread.
#[derive(Debug, Clone)]
pub struct CpuPair {
    /// Every CPU that this process may use.
    all: CpuSet,
    engine: CpuSet,
    answerer: CpuSet,
}

impl CpuPair {
    /// The first two CPUs that this process may use; the same CPU twice if there is only one.
    ///
    /// # Errors
    /// The system does not tell the allowed CPUs.
    pub fn choose() -> io::Result<Self> {
        let all = sched_getaffinity(None)?;
        let mut allowed = (0..CpuSet::MAX_CPU).filter(|&cpu| all.is_set(cpu));
        let engine = allowed.next().unwrap_or(0);
        let answerer = allowed.next().unwrap_or(engine);
        Ok(Self { all, engine: only(engine), answerer: only(answerer) })
    }

    /// Puts the calling thread, and the threads that it starts from now on, on the engine's CPU.
    ///
    /// # Errors
    /// The system refuses.
    pub fn be_engine(&self) -> io::Result<()> {
        Ok(sched_setaffinity(None, &self.engine)?)
    }

    /// Puts the calling thread, and the threads that it starts from now on, on all CPUs but the answerer's: for many engines at
    /// once. Of two CPUs, the engine's CPU is left.
    ///
    /// # Errors
    /// The system refuses.
    pub fn be_engines(&self) -> io::Result<()> {
        let mut others = self.all;
        for cpu in (0..CpuSet::MAX_CPU).filter(|&cpu| self.answerer.is_set(cpu) && self.all.count() > 1) {
            others.unset(cpu);
        }
        Ok(sched_setaffinity(None, &others)?)
    }

    /// The number of CPUs that this process may use.
    pub fn cpus(&self) -> usize {
        self.all.count() as usize
    }

    /// Puts the calling thread, and the threads that it starts from now on, on the answerer's CPU.
    ///
    /// # Errors
    /// The system refuses.
    pub fn be_answerer(&self) -> io::Result<()> {
        Ok(sched_setaffinity(None, &self.answerer)?)
    }

    /// Puts all threads of a process on the engine's CPU.
    ///
    /// # Errors
    /// The system refuses, or there is no such process.
    pub fn put_with_engine(&self, pid: u32) -> io::Result<()> {
        put(pid, &self.engine)
    }

    /// Puts all threads of a process on the answerer's CPU.
    ///
    /// # Errors
    /// The system refuses, or there is no such process.
    pub fn put_with_answerer(&self, pid: u32) -> io::Result<()> {
        put(pid, &self.answerer)
    }

    /// Lets the calling thread run anywhere again.
    ///
    /// # Errors
    /// The system refuses.
    pub fn be_anywhere(&self) -> io::Result<()> {
        Ok(sched_setaffinity(None, &self.all)?)
    }
}

fn put(pid: u32, cpus: &CpuSet) -> io::Result<()> {
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = task?.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        match sched_setaffinity(thread, cpus) {
            // The thread has just ended.
            Err(Errno::SRCH) => {}
            put => put?,
        }
    }
    Ok(())
}

fn only(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_goes_where_it_is_put_and_back() {
        let before = sched_getaffinity(None).unwrap();
        let placement = CpuPair::choose().unwrap();
        placement.be_engine().unwrap();
        assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        placement.be_answerer().unwrap();
        assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        placement.be_anywhere().unwrap();
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
