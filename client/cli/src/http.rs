//! Asks Larder's own servers.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use serde::de::DeserializeOwned;

/// `GET http://ADDRESS PATH` as JSON.
pub(crate) fn get_json<T: DeserializeOwned>(address: SocketAddr, path: &str) -> anyhow::Result<T> {
    let (url, body) = get(address, path)?;
    serde_json::from_slice(&body).with_context(|| format!("{url} is no Larder server of this version"))
}

/// The same as text.
pub(crate) fn get_text(address: SocketAddr, path: &str) -> anyhow::Result<String> {
    let (url, body) = get(address, path)?;
    String::from_utf8(body).with_context(|| format!("{url} is no Larder server of this version"))
}

fn get(address: SocketAddr, path: &str) -> anyhow::Result<(String, Vec<u8>)> {
    let url = format!("http://{address}{path}");
    let agent: ureq::Agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).build().into();
    let mut answer = agent.get(&url).call().with_context(|| format!("no answer from {url}"))?;
    let body = answer
        .body_mut()
        .with_config()
        .limit(MAX_BODY_BYTES)
        .read_to_vec()
        .with_context(|| format!("no whole answer from {url}"))?;
    Ok((url, body))
}

const TIMEOUT: Duration = Duration::from_secs(5);
const MAX_BODY_BYTES: u64 = 16 << 20;
