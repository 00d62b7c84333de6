//! The tracing part of a configuration, checked.

use serde::{Deserialize, Serialize};

use super::Sampler;

/// The collector of spans, and the fraction of requests to trace. Off without an endpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TracingConfig {
    /// The collector, as `http://host:port`: OTLP over HTTP, whose usual port is 4318.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Fraction of the requests to record, among those without a caller's trace. Requests that their caller records are
    /// always recorded.
    pub sample_ratio: f64,
}

/// An endpoint that spans cannot be sent to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "tracing.endpoint `{endpoint}`: set it to http://host:port of a collector that takes OTLP over HTTP, usually port 4318; reach a collector that requires TLS through an agent on this host"
)]
pub struct InvalidEndpoint {
    /// The value found.
    pub endpoint: String,
}

impl TracingConfig {
    /// Decides which requests are recorded.
    #[must_use]
    pub fn sampler(&self) -> Sampler {
        match &self.endpoint {
            Some(_) => Sampler::new(self.sample_ratio),
            None => Sampler::default(),
        }
    }

    /// Takes the endpoint of the environment (`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, else `OTEL_EXPORTER_OTLP_ENDPOINT`) if
    /// the file names none.
    #[must_use]
    pub fn or_from_environment(mut self) -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        self.endpoint = self
            .endpoint
            .or_else(|| variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
            .or_else(|| variable("OTEL_EXPORTER_OTLP_ENDPOINT"));
        self
    }

    /// The URL for requests to the collector: the endpoint, with the usual path if it names none.
    ///
    /// # Errors
    /// Fails if the endpoint is no usable address.
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

/// The usual path at which a collector takes spans.
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
