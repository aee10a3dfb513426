//! Generates answers of models whose output is split into channels.
use crate::generate::{GenerateArgs, Generation, Observer, generate};
use kvist_model::Error;
use kvist_model::harmony::{ChannelParser, Delta};

/// Like [`generate`], for a prompt that ends with the beginning of an answer. If the model answers in channels, the
/// generation's text is the final answer. Its reasoning goes to [`Observer::reasoning`] and is the second return value.
/// For other models that string is empty.
pub fn generate_answer(
    args: GenerateArgs<'_>,
    observer: &mut dyn Observer,
) -> Result<(Generation, String), Error> {
    let model = args.session.model().clone();
    let Some(marks) = model.harmony() else {
        return Ok((generate(args, observer)?, String::new()));
    };
    let mut channels = Channels::new(marks, observer);
    let generation = generate(args, &mut channels)?;
    let (text, reasoning) = channels.finish();
    Ok((Generation { text, ..generation }, reasoning))
}

/// Splits an answer into content and reasoning and passes both on to an observer. The prompt declares no functions, so
/// a function call counts as content.
struct Channels<'o> {
    marks: &'o [u32],
    parser: ChannelParser,
    observer: &'o mut dyn Observer,
    content: String,
    reasoning: String,
}

impl<'o> Channels<'o> {
    fn new(marks: &'o [u32], observer: &'o mut dyn Observer) -> Self {
        let (content, reasoning) = (String::new(), String::new());
        Channels { marks, parser: ChannelParser::new(false), observer, content, reasoning }
    }

    fn emit(&mut self, deltas: Vec<Delta>) -> bool {
        let mut continues = true;
        for delta in deltas {
            continues &= match delta {
                Delta::Reasoning(text) => {
                    self.reasoning += &text;
                    self.observer.reasoning(&text)
                }
                Delta::Content(text) | Delta::Call { arguments: text, .. } => {
                    self.content += &text;
                    self.observer.text(&text)
                }
            };
        }
        continues
    }

    /// The content and the reasoning.
    fn finish(mut self) -> (String, String) {
        let mut rest = Vec::new();
        self.parser.finish(&mut rest);
        self.emit(rest);
        (self.content, self.reasoning)
    }
}

impl Observer for Channels<'_> {
    fn prefilled(&mut self, tokens: usize) -> bool {
        self.observer.prefilled(tokens)
    }
    fn sampled(&mut self) -> bool {
        self.observer.sampled()
    }
    fn text(&mut self, text: &str) -> bool {
        let mut deltas = Vec::new();
        self.parser.push(text, &mut deltas);
        self.emit(deltas)
    }
    fn written(&self) -> &[u32] {
        self.marks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Heard(String, String);

    impl Observer for Heard {
        fn text(&mut self, text: &str) -> bool {
            self.0 += text;
            true
        }
        fn reasoning(&mut self, text: &str) -> bool {
            self.1 += text;
            self.1.len() < 4
        }
    }

    #[test]
    fn an_observer_hears_what_is_said_and_what_is_thought() {
        let mut heard = Heard::default();
        let mut channels = Channels::new(&[], &mut heard);
        assert!(channels.text("<|channel|>analysis<|message|>So"));
        assert!(!channels.text("so."), "it was to stop");
        assert!(channels.text("<|end|><|start|>assistant<|channel|>final<|message|>Yes<"));
        let parsed = channels.finish();
        assert_eq!(parsed, ("Yes<".to_string(), "Soso.".to_string()));
        assert_eq!((heard.0, heard.1), parsed);
    }
}
