//! Places that tenants share.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// The places that each tenant has of a limited number. No tenant takes more places than it leaves free: one alone takes half of
/// them, two that take all they can take a third each, and a tenant that has none finds a place.
#[derive(Debug)]
pub struct FairPlaces<T>(BTreeMap<T, u64>);

impl<T> Default for FairPlaces<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Ord> FairPlaces<T> {
    /// Takes `more` places for a tenant, if all tenants together may have `most`. Returns whether the tenant has them.
    #[must_use]
    pub fn take(&mut self, tenant: T, more: u64, most: u64) -> bool {
        let all = self.0.values().sum::<u64>() + more;
        let own = self.0.get(&tenant).copied().unwrap_or(0) + more;
        let may_take = own + all <= most;
        if may_take {
            self.0.insert(tenant, own);
        }
        may_take
    }

    /// Gives back places that a tenant has.
    pub fn give_back(&mut self, tenant: T, places: u64) {
        if let Entry::Occupied(mut own) = self.0.entry(tenant) {
            *own.get_mut() -= places;
            if *own.get() == 0 {
                own.remove();
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn are_free(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tenant_takes_more_than_it_leaves_free() {
        let mut places = FairPlaces::default();
        let take =
            |places: &mut FairPlaces<u8>, tenant| (0..100).take_while(|_| places.take(tenant, 1, 90)).count();
        assert_eq!((take(&mut places, 1), take(&mut places, 2), take(&mut places, 3)), (45, 22, 11));
        places.give_back(1, 45);
        assert!(places.take(4, 28, 90) && !places.take(4, 1, 90));
        [(2, 22), (3, 11), (4, 28), (5, 1)]
            .into_iter()
            .for_each(|(tenant, own)| places.give_back(tenant, own));
        assert!(places.are_free());
    }
}
