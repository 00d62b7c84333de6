//! The time until which a server's own certificate may be used.

use std::time::{SystemTime, UNIX_EPOCH};

crate::metrics_table! {
    /// The own certificate of this process.
    pub struct CertificateMetrics: "Certificate", "coordinators, and nodes in a cluster" => {
        expires: IntGauge = "larder_certificate_expires_timestamp_seconds", "seconds", [],
            "Time at which the process's own certificate expires, since 1970; 0 if there is no certificate, or it never expires";
    }
}

impl CertificateMetrics {
    /// Sets the end of the certificate; `None` if it never expires.
    pub fn show(&self, not_after: Option<SystemTime>) {
        let since = not_after.map(|time| time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
        self.expires.set(since.unwrap_or(0) as i64);
    }
}
