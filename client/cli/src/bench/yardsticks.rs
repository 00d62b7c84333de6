//! The best that the machine can do: the other side of every ratio.

use std::cell::Cell;
use std::collections::HashMap;
use std::hint::black_box;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use super::placement::CpuPair;

/// Copies between buffers that are too large for any cache.
#[derive(Debug)]
pub struct Memcpy {
    sources: Vec<Vec<u8>>,
    targets: Vec<Vec<u8>>,
    next: usize,
}

impl Memcpy {
    /// Buffers of `bytes` each, touched already; as many as fill [`WORKING_SET_BYTES`] on each side, and at least two.
    pub fn new(bytes: usize) -> Self {
        let buffers = (WORKING_SET_BYTES / bytes.max(1)).clamp(2, MAX_BUFFERS);
        let filled = |value| vec![vec![value; bytes]; buffers];
        Self { sources: filled(1), targets: filled(2), next: 0 }
    }

    /// Copies the next source to the next target.
    pub fn pass(&mut self) {
        let at = self.next % self.sources.len();
        self.next += 1;
        self.targets[at].copy_from_slice(black_box(&self.sources[at]));
        black_box(&mut self.targets[at]);
    }
}

/// Requests and answers of fixed sizes over a Unix socket, between two threads, with nothing else done.
#[derive(Debug)]
pub struct PingPong {
    socket: UnixStream,
    request: Vec<u8>,
    response: Vec<u8>,
    /// Taken when dropped.
    peer: Option<JoinHandle<io::Result<()>>>,
}

impl PingPong {
    /// Starts the thread that answers, on the answerer's CPU.
    ///
    /// # Errors
    /// The system gives no socket or no thread.
    pub fn start(placement: &CpuPair, request_bytes: usize, response_bytes: usize) -> io::Result<Self> {
        let placement = placement.clone();
        let (socket, peer) = UnixStream::pair()?;
        let peer = std::thread::Builder::new().name("ping-pong".into()).spawn(move || {
            placement.be_answerer()?;
            answer(peer, request_bytes, response_bytes)
        })?;
        let (request, response) = (vec![1; request_bytes], vec![0; response_bytes]);
        Ok(Self { socket, request, response, peer: Some(peer) })
    }

    /// Sends one request and reads its answer.
    ///
    /// # Errors
    /// The thread that answers is gone.
    pub fn round_trip(&mut self) -> io::Result<()> {
        self.socket.write_all(&self.request)?;
        self.socket.read_exact(&mut self.response)
    }
}

impl Drop for PingPong {
    fn drop(&mut self) {
        // The peer's loop ends at its next read; the thread's result does not matter.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let _ = self.peer.take().map(JoinHandle::join);
    }
}

/// Probes of the standard library's hash map with keys of 32 bytes.
#[derive(Debug)]
pub struct HashProbes {
    map: HashMap<[u8; 32], u64>,
    keys: Vec<[u8; 32]>,
    probes: usize,
    next: Cell<usize>,
}

impl HashProbes {
    /// A map with `entries` entries; each pass probes `probes` entries, drawn with `seed`.
    pub fn new(entries: u64, probes: usize, seed: u64) -> Self {
        let map = (0..entries).map(|number| (key(number), number)).collect();
        let mut rng = fastrand::Rng::with_seed(seed);
        let keys = (0..KEYS.max(probes)).map(|_| key(rng.u64(..entries.max(1)))).collect();
        Self { map, keys, probes, next: Cell::new(0) }
    }

    /// Probes the next keys; returns how many were there.
    pub fn pass(&self) -> usize {
        let end = self.next.get() + self.probes;
        let (start, end) = if end > self.keys.len() { (0, self.probes) } else { (self.next.get(), end) };
        self.next.set(end);
        self.keys[start..end].iter().filter(|key| self.map.contains_key(black_box(*key))).count()
    }
}

fn answer(mut socket: UnixStream, request_bytes: usize, response_bytes: usize) -> io::Result<()> {
    let (mut request, response) = (vec![0; request_bytes], vec![1; response_bytes]);
    loop {
        socket.read_exact(&mut request)?;
        socket.write_all(&response)?;
    }
}

fn key(number: u64) -> [u8; 32] {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    key
}

/// Keys that [`HashProbes`] walks over: enough that no CPU cache holds their entries.
const KEYS: usize = 100_000;

/// Bytes on each side of a [`Memcpy`]: more than the caches of a core.
pub const WORKING_SET_BYTES: usize = 64 << 20;

const MAX_BUFFERS: usize = 4_096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_walks_over_buffers_that_no_cache_holds() {
        let mut memcpy = Memcpy::new(4 << 20);
        assert_eq!(memcpy.sources.len(), 16);
        (0..16).for_each(|_| memcpy.pass());
        assert!(memcpy.targets.iter().flatten().all(|&byte| byte == 1));
    }

    #[test]
    fn a_ping_pong_answers_and_its_thread_ends_with_it() {
        for (request, response) in [(3_200, 64), (16, 300_000)] {
            let mut ping_pong = PingPong::start(&CpuPair::choose().unwrap(), request, response).unwrap();
            (0..10).for_each(|_| ping_pong.round_trip().unwrap());
            assert!(ping_pong.response.iter().all(|&byte| byte == 1));
        }
    }

    #[test]
    fn every_probe_finds_its_key() {
        assert_eq!(HashProbes::new(10_000, 100, 1).pass(), 100);
    }
}
