//! Copies by a device between engines' GPU memory and blocks.
//!
//! An engine's request begins a copy (`asks`), and the device says how the copy ends (`ends`). The store keeps the touched
//! slots in place, the [`Account`] decides who hears of the end, and a few blocks stay in the GPU's
//! own memory ([`DeviceTier`], `promote`).
//!
//! A save is a hand-over. The device writes into reserved slots, the copy threads sum the bytes there, and the commit names no
//! source. So a copy that failed, stalled or came late cannot be committed, and a reader that follows the chunk gets each layer
//! as it comes. Copies that took too long, or whose session ended, keep their slots in quarantine while the device may touch
//! them. A copy that has not begun by then, because the engine's stream did not raise its word, is given up.

mod account;
mod asks;
mod ends;
mod promote;
mod slots;
mod tier;

use std::collections::HashMap;

use larder_protocol::limits::{MAX_SESSION_COPIES, MAX_SESSION_TENSORS};
use larder_protocol::session::Scarce;

use self::account::{Account, AccountLimits};
use self::slots::{SlotId, Slots};
use self::tier::DeviceTier;
use crate::Core;
use crate::copies::Save;
use crate::effect::Effect;
use crate::event::{DeviceCopyNumber, RequestId};
use crate::store::ids::{OrderId, SessionId, TenantId};
use crate::store::policy::{Facts, PolicyName};
use crate::store::{BlockFacts, BlockMove, LoadBlock, Refused, Usage};

/// The limits of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Copies under way at a time.
    pub orders: usize,
    /// How long the caller of a copy waits for it.
    pub copy_deadline_ms: u64,
    /// Bytes of the device tier; 0 for a device without this tier.
    pub tier_bytes: u64,
    /// The eviction policy of the device tier.
    pub tier_policy: PolicyName,
}

/// An engine's tensors, which the device knows.
#[derive(Debug, Clone, Copy)]
pub struct Tensors {
    /// The device's own number of these tensors.
    pub id: u32,
    /// Number of the namespace.
    pub namespace: u32,
    /// The block of each chunk that the tensors hold: its position by slice, then pool.
    pub block: usize,
    /// The block's size and layers.
    pub facts: BlockFacts,
    /// Pages of each layer.
    pub pages: u32,
    /// Pages of a chunk.
    pub pages_per_chunk: u32,
}

/// Requests to a device and their copies.
#[derive(Debug)]
pub(crate) struct Device {
    account: Account<CopyClaims>,
    tier: DeviceTier,
    tensors: HashMap<(SessionId, u32), Tensors>,
    last_tensors: u32,
    /// Requests for copies that the device's thread has not accepted or refused yet.
    untaken: HashMap<DeviceCopyNumber, RequestId>,
    /// Saves whose bytes are in place, but not summed, since too much was being copied.
    unsummed: Vec<Save>,
}

/// The resources that a copy keeps from reuse.
#[derive(Debug)]
struct CopyClaims {
    what: HeldBy,
    /// The tenant that asked for the copy, if one did. The session may be over.
    tenant: Option<TenantId>,
    bytes: u64,
}

#[derive(Debug)]
enum HeldBy {
    /// The store's load with this number, and its blocks that go into the device tier if the load succeeds.
    Load(u64, Vec<LoadBlock>),
    /// The store's load with this number, while its blocks are copied into the device tier.
    Promotion(u64, Vec<(SlotId, Facts)>),
    /// The store's save with this number, and the blocks to sum if the save succeeds.
    Save(OrderId, Vec<BlockMove>),
    /// Nothing of the store: a fault ended the store that the copy belonged to.
    Forgotten,
}

impl Device {
    pub(crate) fn new(limits: DeviceLimits) -> Self {
        let account = AccountLimits {
            copies: limits.orders,
            of_session: MAX_SESSION_COPIES,
            deadline_ms: limits.copy_deadline_ms,
        };
        Self {
            account: Account::new(account),
            tier: DeviceTier::new(limits.tier_bytes, limits.tier_policy),
            tensors: HashMap::new(),
            last_tensors: 0,
            untaken: HashMap::new(),
            unsummed: Vec::new(),
        }
    }
}

impl Core {
    /// Whether a session may register tensors, and the facts of the block that they hold.
    ///
    /// # Errors
    /// [`Refused::Unknown`] for a namespace or block that the session does not have, [`Refused::TooManyTensors`].
    pub fn may_know_tensors(
        &self,
        session: SessionId,
        namespace: u32,
        block: usize,
    ) -> Result<BlockFacts, Refused> {
        let facts = self.store.block_facts(session, namespace, block)?;
        self.has_room_for_tensors(session)?;
        Ok(facts)
    }

    fn has_room_for_tensors(&self, session: SessionId) -> Result<(), Refused> {
        let known = self.device.tensors.keys().filter(|(of, _)| *of == session).count();
        if known >= MAX_SESSION_TENSORS {
            return Err(Refused::TooManyTensors { most: MAX_SESSION_TENSORS });
        }
        Ok(())
    }

    /// Notes that the device knows a session's tensors; returns their number in the session.
    ///
    /// # Errors
    /// [`Refused::Internal`] if the session has ended meanwhile.
    pub fn know_tensors(&mut self, session: SessionId, tensors: Tensors) -> Result<u32, Refused> {
        self.store.tenant(session).map_err(|_| Refused::Internal)?;
        // Several may have been asked for before the first was known.
        self.has_room_for_tensors(session)?;
        let device = &mut self.device;
        let are_free = device.account.slots.are_free();
        if let Some(slots) = device.tier.size_slots(tensors.facts.bytes, are_free) {
            device.account.slots = Slots::of(slots);
        }
        device.last_tensors = device.last_tensors.wrapping_add(1);
        device.tensors.insert((session, device.last_tensors), tensors);
        Ok(device.last_tensors)
    }

    /// The use of the device's memory and copies, by the store and by the device.
    pub fn usage(&self) -> Usage {
        let (device_copies, device_tier) = (self.device.account.under_way() as u64, self.device.tier.usage());
        Usage { device_copies, device_tier, ..self.store.usage() }
    }

    /// Ends the copies of a session that ended: running copies go on, copies that have not begun are given up.
    pub(crate) fn end_copies_of(&mut self, session: SessionId) {
        self.device.tensors.retain(|(of, _), _| *of != session);
        let numbers = self.device.account.close(session);
        self.effects.extend(numbers.into_iter().map(Effect::CancelDeviceCopy));
    }

    /// Begins anew after all sessions ended and the store forgot its copies. The device's account and its tier stay: the copies
    /// go on, and the tier's blocks stay right.
    pub(crate) fn begin_device_anew(&mut self) {
        let unperformed = std::mem::take(&mut self.effects);
        for effect in unperformed {
            if let Effect::DeviceCopy(order) = effect {
                self.withdraw(order.number);
            }
        }
        let device = &mut self.device;
        device.tensors.clear();
        device.untaken.clear();
        device.unsummed.clear();
        for held in device.account.all_held() {
            if !matches!(held.what, HeldBy::Promotion(..)) {
                held.what = HeldBy::Forgotten;
            }
        }
        let numbers = device.account.close_all();
        self.effects.extend(numbers.into_iter().map(Effect::CancelDeviceCopy));
    }
}

/// The answer to too many copies: asking again helps as soon as a copy has ended.
const TOO_MANY_COPIES: Refused = Refused::Busy { what: Scarce::Copies, retry_after_ms: COPIES_RETRY_MS };

/// About the time of one copy among many.
const COPIES_RETRY_MS: u64 = 5;

/// Words of a session's page.
pub const SESSION_WORDS: u64 = 1_024;
