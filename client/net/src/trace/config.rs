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
    pub fn sampler(&self) -> Sampler {
        match &self.endpoint {
            Some(_) => Sampler::new(self.sample_ratio),
            None => Sampler::default(),
        }
    }

    /// Takes the endpoint of the environment (`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, else `OTEL_EXPORTER_OTLP_ENDPOINT`) if
    /// the file names none. An endpoint there that cannot be used causes a warning and nothing else: such variables are set for
    /// many programs at once. The second variable names a base, as in OpenTelemetry's specification of the OTLP exporter.
    #[must_use]
    pub fn or_from_environment(self) -> Self {
        self.or_from(|name| std::env::var(name).ok())
    }

    fn or_from(mut self, variable: impl Fn(&str) -> Option<String>) -> Self {
        let usable = |name: &str, path: &str| {
            let value = variable(name).filter(|value| !value.is_empty())?;
            let endpoint = Some(format!("{}{path}", value.trim_end_matches('/')));
            let found = Self { endpoint, ..self.clone() };
            if found.url().is_err() {
                tracing::warn!(
                    variable = name,
                    value,
                    "no spans are sent there: larder needs http://host:port of a collector that takes OTLP over HTTP, usually port 4318"
                );
                return None;
            }
            found.endpoint
        };
        if self.endpoint.is_none() {
            self.endpoint = usable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
                .or_else(|| usable("OTEL_EXPORTER_OTLP_ENDPOINT", USUAL_PATH));
        }
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
    fn the_environments_endpoint_is_a_base_or_whole_and_one_that_cannot_be_used_is_passed_over() {
        const WHOLE: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
        const BASE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
        let url = |set: &[(&str, &str)]| {
            let value =
                |name: &str| set.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned());
            TracingConfig::default().or_from(value).url().unwrap()
        };
        assert_eq!(url(&[(BASE, "http://c:4318/otlp")]).unwrap(), "http://c:4318/otlp/v1/traces");
        assert_eq!(url(&[(BASE, "http://c:4318/")]).unwrap(), "http://c:4318/v1/traces");
        assert_eq!(url(&[(BASE, "http://c:4318"), (WHOLE, "http://d:1/spans")]).unwrap(), "http://d:1/spans");
        assert_eq!(url(&[(BASE, "https://c:4317")]), None);
        assert_eq!(url(&[(BASE, "c:4317"), (WHOLE, "")]), None);
        let of_the_file = TracingConfig { endpoint: Some("http://f:1".to_owned()), sample_ratio: 0.0 };
        assert_eq!(of_the_file.clone().or_from(|_| panic!("it is not asked")), of_the_file);
    }

    #[test]
    fn an_endpoint_that_cannot_be_used_is_named() {
        for wrong in ["", "collector:4317", "https://collector:4318", "http://", "grpc://collector:4317"] {
            let error = url(wrong).unwrap_err().to_string();
            assert!(error.contains(&format!("`{wrong}`")) && error.contains("4318"), "{error}");
        }
    }
}
