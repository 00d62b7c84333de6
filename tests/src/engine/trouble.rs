//! Deeds that an operator must hear of: each causes an alert.

use std::any::Any;
use std::io::Write as _;
use std::iter;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::Context as _;
use larder_ipc::Mapping;
use larder_protocol::Chain;
use larder_protocol::session::{Lookup, Pin, Registered, ReportDamage, Request, Response};

use super::put;
use crate::content::{CHUNK_TOKENS, prompt};
use crate::raw::{RawSession, reserve};

/// A session, its registered namespace, and its write window.
pub(super) struct Trouble {
    pub(super) session: RawSession,
    pub(super) registered: Registered,
    pub(super) window: Option<OwnedFd>,
}

impl Trouble {
    /// Does a deed. Returns the things that the process must keep. Deeds that go on for ever end with an error when the node or
    /// the process ends.
    pub(super) fn run(mut self, deed: &str) -> anyhow::Result<Box<dyn Any>> {
        match deed {
            "put" => self.put(0..8)?,
            // More of an arena of 16 MiB than an alert allows, and less than pins may keep.
            "pin much" => {
                self.put(0..15)?;
                (0..15).try_for_each(|name| self.pin(name))?;
            }
            // Leases most of the put chunks, and closes the session, but the process keeps the memory.
            "hold much and close" => {
                self.put(0..8)?;
                let leases: anyhow::Result<Vec<_>> =
                    (0..8).map(|name| self.session.lease(&self.registered, &prompt(name, 128))).collect();
                return Ok(Box::new(leases?));
            }
            "get" => _ = self.session.lease(&self.registered, &prompt(0, 128))?,
            "report" => self.report()?,
            "contradict" => self.contradict()?,
            "misplace" => self.misplace(),
            "look up" => self.for_ever(Self::look_up)?,
            "churn" => self.for_ever(Self::put_if_there_is_room)?,
            "read" => self.for_ever(Self::read)?,
            "ask too much" => self.for_ever(Self::reserve)?,
            other => anyhow::bail!("no such deed: {other}"),
        }
        Ok(Box::new(self.session))
    }

    fn for_ever(&mut self, mut deed: impl FnMut(&mut Self, u8) -> anyhow::Result<()>) -> anyhow::Result<()> {
        std::io::stdout().write_all(b"done\n")?;
        (0..=u8::MAX).cycle().try_for_each(|name| deed(self, name))
    }

    fn chain(&self, name: u8) -> Chain {
        Chain::from_root(self.registered.root, prompt(name, 128))
    }

    fn put(&mut self, names: impl Iterator<Item = u8>) -> anyhow::Result<()> {
        let window = self.window.as_ref().context("the session has no window")?;
        let window = Mapping::writable(window.as_fd(), 1 << 20)?;
        for name in names {
            put(&mut self.session, &self.registered, &window, &prompt(name, 128))?;
        }
        Ok(())
    }

    fn put_if_there_is_room(&mut self, name: u8) -> anyhow::Result<()> {
        // A busy node says so; the engine then goes on with the next prompt.
        _ = self.put(iter::once(name));
        Ok(())
    }

    fn pin(&mut self, name: u8) -> anyhow::Result<()> {
        let chain = self.chain(name);
        let pin = Pin { namespace: self.registered.namespace, chain, duration_ms: 600_000 };
        let (answer, _) = self.session.ask(&Request::Pin(pin))?;
        anyhow::ensure!(matches!(answer, Response::Pinned(_)), "not pinned: {answer:?}");
        Ok(())
    }

    /// Reports chunks as damaged, as often as the node listens.
    fn report(&mut self) -> anyhow::Result<()> {
        for hash in prompt(0, 64) {
            let report = ReportDamage { namespace: self.registered.namespace, hash };
            self.session.ask(&Request::ReportDamage(report))?;
        }
        Ok(())
    }

    /// Gives the hash of a prompt's second chunk to the first chunk of another prompt, which has more chunks.
    fn contradict(&mut self) -> anyhow::Result<()> {
        self.put(0..1)?;
        let hashes = [prompt(0, 2)[1], prompt(u8::MAX, 1)[0]];
        (0..1_000).try_for_each(|_| self.session.ask(&reserve(&self.registered, &hashes)).map(drop))
    }

    /// Reads the second chunk of each prompt as the first chunk of another prompt.
    fn misplace(&mut self) {
        for name in 0..=u8::MAX {
            // A node that has no such chunk leases nothing.
            _ = self.session.lease(&self.registered, &prompt(name, 2)[1..]);
        }
    }

    fn look_up(&mut self, name: u8) -> anyhow::Result<()> {
        let lookup = Lookup {
            namespace: self.registered.namespace,
            chain: self.chain(name),
            prompt_tokens: 129 * u64::from(CHUNK_TOKENS),
            skip_read: false,
            preempted: false,
            tiers: Vec::new(),
            pin_ms: None,
            prefill_tokens_per_second: None,
        };
        self.session.ask(&Request::Lookup(lookup))?;
        Ok(())
    }

    fn read(&mut self, name: u8) -> anyhow::Result<()> {
        let lease = self.session.lease(&self.registered, &prompt(name, 128))?;
        // Without such a chunk, nothing is leased.
        if !lease.places.is_empty() {
            self.session.send(&Request::Release(lease.lease))?;
        }
        Ok(())
    }

    /// Asks for room and neither fills it nor gives it back.
    fn reserve(&mut self, name: u8) -> anyhow::Result<()> {
        self.session.ask(&reserve(&self.registered, &prompt(name, 128)))?;
        Ok(())
    }
}
