//! Shares: divides a resource among tenants, and keeps a part for tenants that have little of it.

use std::collections::HashMap;

use super::ids::TenantId;

/// Each tenant's share of a limited resource.
#[derive(Debug, Default)]
pub(super) struct Shares(HashMap<TenantId, u64>);

impl Shares {
    pub(super) fn total(&self) -> u64 {
        self.0.values().sum()
    }

    pub(super) fn add(&mut self, tenant: TenantId, more: u64) {
        *self.0.entry(tenant).or_default() += more;
    }

    pub(super) fn take(&mut self, tenant: TenantId, less: u64) {
        *self.0.entry(tenant).or_default() -= less;
    }

    /// Whether a tenant may have `more`, if all tenants together may have `most`. Half is kept for all tenants in equal parts, so
    /// that no tenant can leave the others with nothing. The rest goes to the first tenant that asks. A part may be too small for
    /// one chunk, so a tenant that has nothing may have up to a half while that is free. `tenants` has the bytes of extents of each
    /// tenant; a tenant with 0 bytes is not served.
    pub(super) fn may_add(&self, tenant: TenantId, more: u64, most: u64, tenants: &[u64]) -> bool {
        let served =
            || (0..).map(TenantId).zip(tenants).filter(|(_, bytes)| **bytes > 0).map(|(served, _)| served);
        let kept_for_each = most / (2 * served().count().max(1) as u64);
        let has = |tenant: TenantId| self.0.get(&tenant).copied().unwrap_or(0);
        let others = served().filter(|&other| other != tenant);
        let unused = |other| kept_for_each.saturating_sub(has(other));
        let is_first = has(tenant) == 0 && more <= most / 2;
        let kept_for_others: u64 = if is_first { 0 } else { others.map(unused).sum() };
        self.total() + more + kept_for_others <= most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_tenant_alone_may_have_all() {
        let mut shares = Shares::default();
        assert!(shares.may_add(TenantId(0), 100, 100, &[1]));
        shares.add(TenantId(0), 100);
        assert!(!shares.may_add(TenantId(0), 1, 100, &[1]));
        shares.take(TenantId(0), 1);
        assert!(shares.may_add(TenantId(0), 1, 100, &[1]));
    }

    #[test]
    fn a_part_is_kept_for_each_tenant_that_has_less() {
        let mut shares = Shares::default();
        assert!(!shares.may_add(TenantId(0), 76, 100, &[1, 1]));
        assert!(shares.may_add(TenantId(0), 75, 100, &[1, 1]));
        shares.add(TenantId(0), 75);
        assert!(shares.may_add(TenantId(1), 25, 100, &[1, 1]));
        shares.add(TenantId(1), 25);
        assert!(!shares.may_add(TenantId(0), 1, 100, &[1, 1]));
    }

    #[test]
    fn a_tenant_that_has_nothing_may_have_one_chunk_that_is_larger_than_its_part() {
        let mut shares = Shares::default();
        let four = [1; 4];
        shares.add(TenantId(0), 60);
        assert!(!shares.may_add(TenantId(0), 30, 100, &four));
        assert!(shares.may_add(TenantId(1), 30, 100, &four));
        shares.add(TenantId(1), 30);
        assert!(!shares.may_add(TenantId(1), 1, 100, &four));
        assert!(!shares.may_add(TenantId(2), 30, 100, &four), "it does not fit");
    }

    #[test]
    fn nothing_is_kept_for_a_tenant_that_left() {
        let shares = Shares::default();
        assert!(shares.may_add(TenantId(2), 75, 100, &[1, 0, 1]));
        assert!(!shares.may_add(TenantId(2), 76, 100, &[1, 0, 1]));
        assert!(shares.may_add(TenantId(2), 100, 100, &[0, 0, 1]));
    }
}
