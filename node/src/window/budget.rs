//! The bytes that the write windows of one tenant may take together. A session takes the bytes of its whole window at its hello.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus::IntGauge;

/// The bytes that a tenant's write windows may take. Cloning shares.
#[derive(Debug, Clone)]
pub struct WindowBudget(Arc<Account>);

/// Bytes of one window. Dropping it gives them back.
#[derive(Debug)]
pub struct WindowShare {
    account: Arc<Account>,
    bytes: u64,
}

#[derive(Debug)]
struct Account {
    limit_bytes: AtomicU64,
    held_bytes: AtomicU64,
    /// Shows `held_bytes`.
    gauge: IntGauge,
}

impl WindowBudget {
    /// A budget from which nothing is taken yet. `gauge` shows the taken bytes.
    pub fn new(limit_bytes: u64, gauge: IntGauge) -> Self {
        let limit_bytes = AtomicU64::new(limit_bytes);
        Self(Arc::new(Account { limit_bytes, held_bytes: AtomicU64::new(0), gauge }))
    }

    /// The limit of all bytes together.
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes.load(Ordering::Relaxed)
    }

    /// Changes the limit. Windows that already exceed it stay.
    pub fn bound(&self, limit_bytes: u64) {
        self.0.limit_bytes.store(limit_bytes, Ordering::Relaxed);
    }

    /// Takes `bytes` bytes; `None` if fewer are left.
    #[must_use]
    pub fn take(&self, bytes: u64) -> Option<WindowShare> {
        let fits = |held: u64| held.checked_add(bytes).filter(|&held| held <= self.limit_bytes());
        self.0.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        self.0.gauge.add(bytes as i64);
        Some(WindowShare { account: Arc::clone(&self.0), bytes })
    }
}

impl Drop for WindowShare {
    fn drop(&mut self) {
        self.account.held_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.account.gauge.sub(self.bytes as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_takes_no_more_than_its_budget_and_gets_back_what_is_dropped() {
        let gauge = IntGauge::new("bytes", "held").unwrap();
        let budget = WindowBudget::new(10, gauge.clone());
        let first = budget.take(6).unwrap();
        assert!(budget.take(5).is_none() && budget.take(u64::MAX).is_none());
        let second = budget.clone().take(4).unwrap();
        assert_eq!(gauge.get(), 10);
        drop(first);
        assert!(budget.take(7).is_none());
        assert_eq!(budget.take(6).map(|share| share.bytes), Some(6));
        budget.bound(4);
        assert!(budget.take(1).is_none());
        drop(second);
        assert_eq!(gauge.get(), 0);
    }
}
