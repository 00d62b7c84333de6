//! Recognizes files that look like traces, but lack the ids that tell common beginnings of prompts.

use std::fmt;

/// A file that cannot be played.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Foreign {
    /// The result of `vllm bench serve`, with or without the details of each request.
    VllmBench,
    /// The records of an AIPerf run, one for each request.
    AiperfRecords,
    /// The requests of an AIPerf run, as text.
    AiperfInputs,
    /// A request with its text instead of ids.
    Text,
    /// An object over several lines.
    ManyLines,
}

impl Foreign {
    /// Recognizes a line, or the beginning of a long line, by its fields.
    pub(super) fn of(line: &[u8]) -> Option<Self> {
        let has = |field: &str| line.windows(field.len()).any(|part| part == field.as_bytes());
        let is_like = |fields: &[&str]| fields.iter().all(|field| has(field));
        if matches!(line.trim_ascii(), b"{" | b"[") {
            Some(Self::ManyLines)
        } else if is_like(&["\"num_prompts\"", "\"request_throughput\""]) {
            Some(Self::VllmBench)
        } else if is_like(&["\"metadata\"", "\"metrics\"", "\"request_start_ns\""]) {
            Some(Self::AiperfRecords)
        } else if is_like(&["\"data\"", "\"payloads\""]) {
            Some(Self::AiperfInputs)
        } else if !has("\"hash_ids\"") && (has("\"text_input\"") || has("\"messages\"")) {
            Some(Self::Text)
        } else {
            None
        }
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::VllmBench => {
                "the result of `vllm bench serve`: it has lengths and times, but no ids, so the common beginnings of prompts are unknown; record the engines' lookups (`larder node --record FILE`), and plan with the record"
            }
            Self::AiperfRecords => {
                "the records of an AIPerf run: they have lengths and times, but no ids, so the common beginnings of prompts are unknown; plan with the run's --input-file, if it has `hash_ids`"
            }
            Self::AiperfInputs => {
                "the requests of an AIPerf run as text: they have no ids and no times; plan with the file that was the run's \
                 --input-file, if it has `hash_ids`"
            }
            Self::Text => {
                "a request with its text instead of `hash_ids`: its blocks depend on the tokenizer; record the engines' lookups (`larder node --record FILE`), and plan with the record"
            }
            Self::ManyLines => "an object over several lines; a trace has one JSON object a line",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_without_ids_are_known_by_their_fields() {
        let vllm = r#"{"date":"20260101-000000","backend":"vllm","model_id":"m","num_prompts":2,"duration":1.5,"completed":2,"request_throughput":1.3,"input_lens":[9,8],"ttfts":[0.1,0.2],"generated_texts":["a","b"]}"#;
        let record = r#"{"metadata":{"session_num":0,"conversation_id":"c","turn_index":0,"request_start_ns":1},"metrics":{"input_sequence_length":{"value":5,"unit":"tokens"}},"error":null}"#;
        let inputs = r#"{"data":[{"session_id":"a","payloads":[{"messages":[]}]}]}"#;
        let text = r#"{"timestamp":0,"text_input":"What is a cache?","output_length":20}"#;
        let of = |line: &str| Foreign::of(line.as_bytes());
        assert_eq!((of(vllm), of(record)), (Some(Foreign::VllmBench), Some(Foreign::AiperfRecords)));
        assert_eq!((of(inputs), of(text)), (Some(Foreign::AiperfInputs), Some(Foreign::Text)));
        assert_eq!((of("{\n"), of("{}"), of("nonsense")), (Some(Foreign::ManyLines), None, None));
    }
}
