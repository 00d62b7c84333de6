//! Places for guests: processes that connect without proving who they are. One address has a share of the places at most.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// The guests, by address.
#[derive(Debug, Clone)]
pub(crate) struct Guests {
    known: Arc<Mutex<HashMap<IpAddr, usize>>>,
    all: usize,
    from_one_address: usize,
    leaves: Arc<Notify>,
}

/// The place of a connected guest.
#[derive(Debug)]
pub(crate) struct Guest {
    all: Guests,
    address: IpAddr,
}

impl Guests {
    /// Makes places for this many guests, in all and from one address.
    pub(crate) fn new(all: usize, from_one_address: usize) -> Self {
        Self { known: Arc::default(), all, from_one_address, leaves: Arc::default() }
    }

    /// Takes a place, if one is free.
    pub(crate) fn enter(&self, address: IpAddr) -> Option<Guest> {
        let mut known = larder_net::lock(&self.known);
        if known.values().sum::<usize>() >= self.all
            || known.get(&address).is_some_and(|&guests| guests >= self.from_one_address)
        {
            return None;
        }
        *known.entry(address).or_default() += 1;
        Some(Guest { all: self.clone(), address })
    }

    /// Waits until a guest leaves, from this call on.
    pub(crate) fn left(&self) -> Notified<'_> {
        self.leaves.notified()
    }
}

impl Guest {
    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut known = larder_net::lock(&self.all.known);
        if let Some(guests) = known.get_mut(&self.address) {
            *guests -= 1;
            if *guests == 0 {
                known.remove(&self.address);
            }
        }
        drop(known);
        self.all.leaves.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_does_not_take_all_places() {
        let guests = Guests::new(256, 64);
        let address = |last| IpAddr::from([10, 0, 0, last]);
        let taken: Vec<_> = (0..256).map_while(|_| guests.enter(address(1))).collect();
        assert_eq!(taken.len(), 64);
        let others: Vec<_> =
            (2..=9).flat_map(|last| vec![last; 60]).filter_map(|last| guests.enter(address(last))).collect();
        assert_eq!(taken.len() + others.len(), 256);
        drop(taken);
        assert!(guests.enter(address(1)).is_some());
    }
}
