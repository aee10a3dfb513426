//! Reads server-sent events.
use crate::{Chunk, Error, Usage, refused};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};

/// A streamed answer. Dropping it closes the connection, which ends the generation.
pub struct Stream {
    lines: BufReader<Box<dyn Read + Send>>,
    over: bool,
}

impl Stream {
    pub(crate) fn new(body: impl Read + Send + 'static) -> Self {
        Stream { lines: BufReader::new(Box::new(body)), over: false }
    }

    /// Reads the stream to its end and returns the whole text of the first answer, and the usage of all. Of several
    /// answers (`n`), the others are in the chunks only.
    pub fn text(self) -> Result<(String, Usage), Error> {
        let (mut text, mut usage) = (String::new(), Usage::default());
        for chunk in self {
            let chunk = chunk?;
            if chunk.index == 0 {
                text += &chunk.text;
            }
            usage = chunk.usage.unwrap_or(usage);
        }
        Ok((text, usage))
    }

    fn read(&mut self) -> Result<Option<Chunk>, Error> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line)? == 0 {
                let early = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "no [DONE]");
                return Err(early.into());
            }
            // Comment lines only keep the connection alive; blank lines separate events.
            let Some(data) = line.trim_end().strip_prefix("data:") else { continue };
            let data = data.trim_start();
            if data == "[DONE]" {
                return Ok(None);
            }
            let event: Value = serde_json::from_str(data)?;
            if let Some(error) = refused(0, &event, None) {
                return Err(error);
            }
            let choice = &event["choices"][0];
            let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
            let index = choice["index"].as_u64().and_then(|index| usize::try_from(index).ok());
            return Ok(Some(Chunk {
                index: index.unwrap_or(0),
                text: text.unwrap_or_default().into(),
                finish_reason: choice["finish_reason"].as_str().map(str::to_string),
                usage: event.get("usage").filter(|usage| !usage.is_null()).map(Usage::of),
                document: event,
            }));
        }
    }
}

impl Iterator for Stream {
    type Item = Result<Chunk, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let read = self.read().transpose();
        self.over = !matches!(read, Some(Ok(_)));
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(text: &'static str) -> Vec<Result<Chunk, Error>> {
        Stream::new(text.as_bytes()).collect()
    }

    #[test]
    fn events_of_both_endpoints_and_errors() {
        let chunks = of(concat!(
            ": alive\n\n",
            "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":null}]}\r\n\r\n",
            "data:{\"choices\":[{\"delta\":{\"content\":\"b\"},\"finish_reason\":\"stop\"}],\"usage\":null}\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\n",
            "data: [DONE]\n\n"
        ));
        let chunks: Vec<Chunk> = chunks.into_iter().map(Result::unwrap).collect();
        assert_eq!(chunks.iter().map(|c| c.text.as_str()).collect::<String>(), "ab");
        assert_eq!(chunks[1].finish_reason.as_deref(), Some("stop"));
        let usage = Usage { prompt_tokens: 3, completion_tokens: 2, ..Usage::default() };
        assert_eq!(chunks[2].usage, Some(usage));

        assert_eq!(chunks[1].document["choices"][0]["delta"], json!({"content": "b"}));

        let mut chunks =
            of("data: {\"error\":{\"message\":\"m\",\"code\":\"shutting_down\"}}\n\ndata: [DONE]\n\n");
        assert_eq!(chunks.len(), 1, "nothing comes behind an error");
        assert!(matches!(chunks.remove(0), Err(Error::Api { code, .. }) if code == "shutting_down"));
        for cut in ["", "data: {\"choices\":[{\"text\":\"a\"}]}\n\n", "data: {\"choi"] {
            assert!(of(cut).pop().unwrap().is_err(), "{cut:?}");
        }
    }

    /// Regression: the texts of all answers were joined piece by piece into one.
    #[test]
    fn answers_to_one_prompt_are_told_apart() {
        let body = concat!(
            "data: {\"choices\":[{\"index\":1,\"text\":\"x\"}]}\n\n",
            "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n",
            "data: {\"choices\":[{\"index\":1,\"text\":\"y\"}]}\n\n",
            "data: {\"choices\":[{\"index\":0,\"text\":\"b\"}]}\n\n",
            "data: {\"choices\":[],\"usage\":{\"completion_tokens\":4}}\n\n",
            "data: [DONE]\n\n"
        );
        let indices: Vec<usize> = of(body).into_iter().map(|chunk| chunk.unwrap().index).collect();
        assert_eq!(indices, [1, 0, 1, 0, 0]);
        let (text, usage) = Stream::new(body.as_bytes()).text().unwrap();
        assert_eq!((text.as_str(), usage.completion_tokens), ("ab", 4));
    }
}
