//! The tracing part of a configuration, checked.

use serde::{Deserialize, Serialize};

use super::Sampler;

/// Where spans go and which requests have some. Off where there is no endpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TracingConfig {
    /// The collector, as `http://host:port`: OTLP over HTTP, whose usual port is 4318.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The fraction of the requests without a trace of the caller's that are recorded. What a caller records is recorded
    /// here too, whatever stands here.
    pub sample_ratio: f64,
}

/// An endpoint that spans cannot be sent to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "tracing.endpoint `{endpoint}`: set it to http://host:port of a collector that takes OTLP over HTTP, usually port 4318; one that wants TLS is reached through an agent on this host"
)]
pub struct InvalidEndpoint {
    /// What was found.
    pub endpoint: String,
}

impl TracingConfig {
    /// Which requests are recorded.
    #[must_use]
    pub fn sampler(&self) -> Sampler {
        match &self.endpoint {
            Some(_) => Sampler::new(self.sample_ratio),
            None => Sampler::default(),
        }
    }

    /// The same, with the endpoint of the environment (`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, else
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`) where it has none of its own.
    #[must_use]
    pub fn or_from_environment(mut self) -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        self.endpoint = self
            .endpoint
            .or_else(|| variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
            .or_else(|| variable("OTEL_EXPORTER_OTLP_ENDPOINT"));
        self
    }

    /// Where requests to the collector go: the endpoint, and the usual path where it names none.
    ///
    /// # Errors
    /// Fails if it is no address that can be used.
    pub fn url(&self) -> Result<Option<String>, InvalidEndpoint> {
        let Some(endpoint) = &self.endpoint else { return Ok(None) };
        let wrong = || InvalidEndpoint { endpoint: endpoint.clone() };
        let url: ureq::http::Uri = endpoint.parse().map_err(|_| wrong())?;
        if url.scheme_str() != Some("http") || url.host().is_none_or(str::is_empty) {
            return Err(wrong());
        }
        let is_base = url.path() == "/" && url.query().is_none();
        let trimmed = endpoint.trim_end_matches('/');
        Ok(Some(if is_base { format!("{trimmed}{USUAL_PATH}") } else { endpoint.clone() }))
    }
}

/// Where a collector takes spans.
const USUAL_PATH: &str = "/v1/traces";

#[cfg(test)]
mod tests {
    use super::*;

    fn url(endpoint: &str) -> Result<Option<String>, InvalidEndpoint> {
        TracingConfig { endpoint: Some(endpoint.to_owned()), sample_ratio: 0.0 }.url()
    }

    #[test]
    fn an_endpoint_without_a_path_means_the_usual_one() {
        assert_eq!(url("http://collector:4318").unwrap().unwrap(), "http://collector:4318/v1/traces");
        assert_eq!(url("http://[::1]:4318/").unwrap().unwrap(), "http://[::1]:4318/v1/traces");
        assert_eq!(url("http://gateway/otlp/v1/traces").unwrap().unwrap(), "http://gateway/otlp/v1/traces");
        assert_eq!(TracingConfig::default().url(), Ok(None));
    }

    #[test]
    fn an_endpoint_that_cannot_be_used_is_named() {
        for wrong in ["", "collector:4317", "https://collector:4318", "http://", "grpc://collector:4317"] {
            let error = url(wrong).unwrap_err().to_string();
            assert!(error.contains(&format!("`{wrong}`")) && error.contains("4318"), "{error}");
        }
    }
}
