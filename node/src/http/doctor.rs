//! `GET /doctor`: the host's problems for the node, and what to do about them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::Mutex;

use super::HttpState;
use super::show::Refused;
use crate::findings::FindingStatus;

/// Examines the host for the configuration in force; `None` if the node has no configuration file. May take seconds.
pub(crate) type Examiner = Arc<dyn Fn() -> BoxFuture<'static, Option<Vec<FindingStatus>>> + Send + Sync>;

/// The last findings, and when they were made; locked during a new examination.
pub(crate) type Findings = Mutex<Option<(Duration, Vec<FindingStatus>)>>;

/// Examines the host, at most once a minute for all requests.
pub(super) async fn findings(state: &HttpState) -> Result<Vec<FindingStatus>, Refused> {
    let mut last = state.findings.lock().await;
    let now = state.clock.elapsed();
    if let Some((at, findings)) = &*last
        && now.saturating_sub(*at) < FRESH
    {
        return Ok(findings.clone());
    }
    let examine = state
        .examiner
        .get()
        .ok_or_else(|| Refused::Question("the node is still starting: try again".to_owned()))?
        .clone();
    let findings = examine().await;
    let findings = findings.ok_or_else(|| {
        Refused::Question("the node has no configuration file, so it does not examine its host".to_owned())
    })?;
    *last = Some((now, findings.clone()));
    Ok(findings)
}

/// The lifetime of findings.
const FRESH: Duration = Duration::from_secs(60);
