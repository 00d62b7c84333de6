//! The tenants' parts of the disk: a tenant that writes much must not push out the records of a tenant that writes little.

use std::collections::HashMap;
use std::hash::Hash;

/// The pages of a tenant's part. Tenants share a disk as equals; a tenant that needs less than its part leaves the rest to the
/// others (max-min fairness). The tenant with the most pages always has its part.
pub(super) fn level(pages: impl IntoIterator<Item = u64>) -> u64 {
    let mut pages: Vec<u64> = pages.into_iter().collect();
    pages.sort_unstable();
    let (mut rest, mut tenants) = (pages.iter().sum::<u64>(), pages.len() as u64);
    for own in pages {
        if own >= rest / tenants {
            return rest / tenants;
        }
        rest -= own;
        tenants -= 1;
    }
    0
}

/// For each namespace whether it keeps its records: its tenant has less than its part. `namespaces` are the tenants and pages of
/// the namespaces; records of nobody are not kept.
pub(super) fn keeps<Owner: Eq + Hash>(namespaces: &[(Option<Owner>, u64)]) -> Vec<bool> {
    let mut tenants: HashMap<&Owner, u64> = HashMap::new();
    for (owner, pages) in namespaces {
        if let Some(owner) = owner {
            *tenants.entry(owner).or_default() += pages;
        }
    }
    let level = level(tenants.values().copied());
    // Tenants that all write much are about equal: none of them keeps old records for new ones.
    let clearly_less = level - level / CLOSE_SHARE;
    let keeps = |owner: &Option<Owner>| owner.as_ref().is_some_and(|owner| tenants[owner] < clearly_less);
    namespaces.iter().map(|(owner, _)| keeps(owner)).collect()
}

/// A tenant that lacks at most one part in this many of its part gives up records like the others.
const CLOSE_SHARE: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_less_than_a_part_keeps_it_and_leaves_the_rest_to_the_others() {
        assert_eq!(level([10, 90]), 90, "the larger one gives up");
        assert_eq!(level([50, 50]), 50, "both give up");
        assert_eq!(level([1, 40, 59]), 59, "40 is less than half of what the first leaves");
        assert_eq!(level([1, 55, 44, 900]), 900);
        assert_eq!(level([7]), 7);
        assert_eq!(level([]), 0);
    }

    #[test]
    fn a_tenant_keeps_all_its_namespaces_or_none_and_nobody_keeps_what_nobody_owns() {
        let namespaces =
            [(Some("quiet"), 5), (Some("busy"), 60), (Some("quiet"), 4), (None, 3), (Some("busy"), 1)];
        assert_eq!(keeps(&namespaces), [true, false, true, false, false]);
        assert_eq!(keeps(&[(Some("alone"), 5), (None, 9)]), [false, false]);
        assert_eq!(keeps::<&str>(&[]), [false; 0]);
        let equals = [(Some(1), 950), (Some(2), 990), (Some(3), 1_000), (Some(4), 870)];
        assert_eq!(keeps(&equals), [false, false, false, true]);
    }
}
