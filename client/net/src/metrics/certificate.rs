//! Until when a server's own certificate may be used.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::{Error, IntGauge};

use super::{Families, Metric, Section};

/// The part of a table that every server has which shows a certificate.
pub const CERTIFICATE: Section = Section {
    title: "Certificate",
    only: "coordinators, and nodes in a cluster",
    metrics: &[Metric::gauge(
        NAME,
        "seconds",
        &[],
        "When the process's own certificate expires, since 1970; 0 where it has none, or it has no end",
    )],
};

/// The own certificate of this process.
#[derive(Debug, Clone)]
pub struct CertificateMetrics(IntGauge);

impl CertificateMetrics {
    /// Registers them.
    ///
    /// # Errors
    /// Fails if the name is taken, or is not in the table.
    pub fn new(families: &Families<'_>) -> Result<Self, Error> {
        Ok(Self(families.gauge(NAME)?))
    }

    /// Notes until when it may be used; `None` if it has no end.
    pub fn show(&self, not_after: Option<SystemTime>) {
        let since = not_after.map(|time| time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
        self.0.set(since.unwrap_or(0) as i64);
    }
}

const NAME: &str = "larder_certificate_expires_timestamp_seconds";
