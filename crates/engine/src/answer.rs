//! Generates answers of models that separate their reasoning.
use crate::generate::{GenerateArgs, Generation, Observer, generate};
use kvist_model::Error;
use kvist_model::answers::AnswerSplitter;
use kvist_model::harmony::Delta;

/// Like [`generate`], for a prompt that ends with the beginning of an answer. If the model separates its reasoning, the
/// generation's text is the final answer. The reasoning goes to [`Observer::reasoning`] and is the second return value.
/// For other models that string is empty.
pub fn generate_answer(
    args: GenerateArgs<'_>,
    observer: &mut dyn Observer,
) -> Result<(Generation, String), Error> {
    let model = args.session.model().clone();
    // The end of the prompt may have been computed before.
    let prompt = [args.before, args.prompt].concat();
    let Some((splitter, marks)) = AnswerSplitter::new(&model, &prompt) else {
        return Ok((generate(args, observer)?, String::new()));
    };
    let mut answer = Answer::new(splitter, marks, observer);
    let generation = generate(args, &mut answer)?;
    let (text, reasoning) = answer.finish();
    Ok((Generation { text, ..generation }, reasoning))
}

/// Splits an answer into content and reasoning and passes both on to an observer. The prompt declares no functions, so
/// a function call counts as content.
struct Answer<'o> {
    marks: &'o [u32],
    splitter: AnswerSplitter,
    observer: &'o mut dyn Observer,
    content: String,
    reasoning: String,
}

impl<'o> Answer<'o> {
    fn new(splitter: AnswerSplitter, marks: &'o [u32], observer: &'o mut dyn Observer) -> Self {
        let (content, reasoning) = (String::new(), String::new());
        Answer { marks, splitter, observer, content, reasoning }
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
        self.splitter.finish(&mut rest);
        self.emit(rest);
        (self.content, self.reasoning)
    }
}

impl Observer for Answer<'_> {
    fn prefilled(&mut self, tokens: usize) -> bool {
        self.observer.prefilled(tokens)
    }
    fn sampled(&mut self) -> bool {
        self.observer.sampled()
    }
    fn text(&mut self, text: &str) -> bool {
        let mut deltas = Vec::new();
        self.splitter.push(text, &mut deltas);
        self.emit(deltas)
    }
    fn written(&self) -> &[u32] {
        self.marks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_model::harmony::ChannelParser;
    use kvist_model::thinking::ThinkParser;

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
        let splitter = AnswerSplitter::Channels(ChannelParser::new(false));
        let mut channels = Answer::new(splitter, &[], &mut heard);
        assert!(channels.text("<|channel|>analysis<|message|>So"));
        assert!(!channels.text("so."), "it was to stop");
        assert!(channels.text("<|end|><|start|>assistant<|channel|>final<|message|>Yes<"));
        let parsed = channels.finish();
        assert_eq!(parsed, ("Yes<".to_string(), "Soso.".to_string()));
        assert_eq!((heard.0, heard.1), parsed);
    }

    #[test]
    fn an_observer_hears_what_comes_before_and_after_the_block() {
        let mut heard = Heard::default();
        let splitter = AnswerSplitter::Thinking(ThinkParser::new(true));
        let mut answer = Answer::new(splitter, &[], &mut heard);
        assert!(answer.text("So\n</thi"));
        assert!(answer.text("nk>\n\nYes"));
        let parsed = answer.finish();
        assert_eq!(parsed, ("Yes".to_string(), "So".to_string()));
        assert_eq!((heard.0, heard.1), parsed);
    }
}
