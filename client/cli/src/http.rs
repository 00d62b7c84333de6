//! Asks Larder's own servers.

use std::fmt::Display;
use std::io::{BufRead, BufReader};
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::Body;
use ureq::config::ConfigBuilder;
use ureq::http::Response;
use ureq::typestate::AgentScope;

/// `GET http://ADDRESS PATH` as JSON.
pub(crate) fn get_json<T: DeserializeOwned>(address: &impl Display, path: &str) -> anyhow::Result<T> {
    let url = format!("http://{address}{path}");
    json(&url, read(&url, agent().get(&url).call())?)
}

/// `GET http://ADDRESS PATH` as text.
pub(crate) fn get_text(address: &impl Display, path: &str) -> anyhow::Result<String> {
    let url = format!("http://{address}{path}");
    Ok(String::from_utf8_lossy(&read(&url, agent().get(&url).call())?).into_owned())
}

/// `POST http://ADDRESS PATH` with JSON, answered in JSON.
pub(crate) fn post_json<T: DeserializeOwned>(
    address: &impl Display,
    path: &str,
    body: &impl Serialize,
) -> anyhow::Result<T> {
    let url = format!("http://{address}{path}");
    let request = agent().post(&url).content_type("application/json");
    json(&url, read(&url, request.send(serde_json::to_vec(body)?))?)
}

/// `GET http://ADDRESS PATH` as lines, for as long as the server sends them.
pub(crate) fn get_lines(
    address: &str,
    path: &str,
) -> anyhow::Result<impl Iterator<Item = std::io::Result<String>> + use<>> {
    let url = format!("http://{address}{path}");
    let agent = config().timeout_connect(Some(TIMEOUT)).timeout_recv_response(Some(TIMEOUT));
    let answer = ureq::Agent::from(agent.build()).get(&url).call();
    let answer = answer.with_context(|| format!("no answer from {url}"))?;
    Ok(BufReader::new(answer.into_body().into_reader()).lines())
}

fn agent() -> ureq::Agent {
    config().timeout_global(Some(TIMEOUT)).build().into()
}

/// Larder's servers are asked directly: a proxy of the environment leads out of the cluster, not into it.
fn config() -> ConfigBuilder<AgentScope> {
    ureq::Agent::config_builder().proxy(None)
}

fn read(url: &str, answer: Result<Response<Body>, ureq::Error>) -> anyhow::Result<Vec<u8>> {
    let mut answer = answer.with_context(|| format!("no answer from {url}"))?;
    let body = answer.body_mut().with_config().limit(MAX_BODY_BYTES);
    body.read_to_vec().with_context(|| format!("the answer from {url} is incomplete"))
}

fn json<T: DeserializeOwned>(url: &str, body: Vec<u8>) -> anyhow::Result<T> {
    serde_json::from_slice(&body).with_context(|| not_larder(&url))
}

/// The error for a server whose answer is not understood.
pub(crate) fn not_larder(server: &impl Display) -> String {
    format!("{server} does not answer as a Larder server of this version")
}

const TIMEOUT: Duration = Duration::from_secs(5);
const MAX_BODY_BYTES: u64 = 16 << 20;
