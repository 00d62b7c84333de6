//! `GET /doctor`: the host's problems for the node, and what to do about them.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::HttpState;
use super::show::Refused;
use crate::clock::Clock;
use crate::findings::FindingStatus;

/// Examines the host for the configuration in force; `None` if the node has no configuration file. May take seconds.
pub(crate) type Examiner = Arc<dyn Fn() -> BoxFuture<'static, Option<Vec<FindingStatus>>> + Send + Sync>;

/// The last findings, and when they were made; locked during a new examination.
pub(crate) type Findings = Arc<Mutex<Option<(Duration, Vec<FindingStatus>)>>>;

/// Examines the host, at most once a minute for all requests.
pub(super) async fn findings(state: &HttpState) -> Result<Vec<FindingStatus>, Refused> {
    let refused = |why: &str| Refused::Question(why.to_owned());
    let examiner = state.examiner.get().ok_or_else(|| refused("the node is still starting: try again"))?;
    let found = fresh(Arc::clone(&state.findings), Arc::clone(examiner), state.clock);
    let found = timeout(PATIENCE, found).await.map_err(|_| {
        refused("the last examination of the host has not ended: a drive or a remote folder may hang")
    })?;
    found.ok_or_else(|| refused("the node has no configuration file, so it does not examine its host"))
}

/// The last findings, or new ones if they are old. An examination goes on when nobody waits for it any more; until it ends, no
/// other one begins.
async fn fresh(findings: Findings, examine: Examiner, clock: Clock) -> Option<Vec<FindingStatus>> {
    let mut last = findings.lock_owned().await;
    let now = clock.elapsed();
    if let Some((at, findings)) = &*last
        && now.saturating_sub(*at) < FRESH
    {
        return Some(findings.clone());
    }
    let examined = actix_rt::spawn(async move {
        let findings = examine().await?;
        *last = Some((now, findings.clone()));
        Some(findings)
    });
    examined.await.unwrap_or_else(|panic| resume_unwind(panic.into_panic()))
}

/// The lifetime of findings.
const FRESH: Duration = Duration::from_secs(60);

/// How long an answer waits for an examination.
const PATIENCE: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn an_examination_that_hangs_holds_nobody_up_and_no_other_one_begins() {
        actix_rt::System::new().block_on(async {
            tokio::time::pause();
            let (findings, begun) = (Findings::default(), Arc::new(AtomicU32::new(0)));
            let count = Arc::clone(&begun);
            let examiner: Examiner = Arc::new(move || {
                count.fetch_add(1, Ordering::Relaxed);
                Box::pin(pending())
            });
            for _ in 0..3 {
                let found = fresh(Arc::clone(&findings), Arc::clone(&examiner), Clock::start());
                assert!(timeout(PATIENCE, found).await.is_err());
            }
            assert_eq!(begun.load(Ordering::Relaxed), 1);
        });
    }
}
