//! Tests histories against what the template renders.
use super::*;
use kvist_model::tokenizer::Ends;

/// ChatML with one token per byte and one per mark. With `forgets`, reasoning in earlier answers is removed
/// once another message follows, as templates of reasoning models do.
struct Bytes {
    forgets: bool,
}

const MARKS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

impl HistoryTokenizer for Bytes {
    type Error = SessionError;

    fn render(
        &self,
        messages: &[Value],
        _: &Map<String, Value>,
        answer: bool,
    ) -> Result<String, SessionError> {
        let mut text = String::new();
        for (i, message) in messages.iter().enumerate() {
            let content = message["content"].as_str().unwrap();
            let content = match content.split_once("/think>") {
                Some((_, content)) if self.forgets && i + 1 < messages.len() => content,
                _ => content,
            };
            text += &format!("<|im_start|>{}\n{content}<|im_end|>\n", message["role"].as_str().unwrap());
        }
        Ok(text + if answer { "<|im_start|>assistant\n" } else { "" })
    }
    fn encode_rendered(&self, text: &str, _: bool) -> Result<Ends, SessionError> {
        let tokens = self.encode(text, false)?;
        let length = |token: &u32| token.checked_sub(256).map_or(1, |mark| MARKS[mark as usize].len());
        let mut end = 0;
        let ends = tokens.iter().map(|token| {
            end += length(token);
            end
        });
        Ok(Ends { ends: ends.collect(), tokens })
    }
    fn max_tokens(&self) -> usize {
        usize::MAX
    }
    fn encode(&self, mut text: &str, _: bool) -> Result<Vec<u32>, SessionError> {
        let mut tokens = Vec::new();
        while let Some(first) = text.bytes().next() {
            let mark = MARKS.iter().position(|mark| text.starts_with(mark));
            tokens.push(mark.map_or(u32::from(first), |mark| 256 + mark as u32));
            text = &text[mark.map_or(1, |mark| MARKS[mark].len())..];
        }
        Ok(tokens)
    }
    fn decode(&self, tokens: &[u32]) -> Result<String, SessionError> {
        Ok(tokens.iter().filter_map(|token| u8::try_from(*token).ok()).map(char::from).collect())
    }
    fn content(&self, answer: &str) -> String {
        answer.into()
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn bodies(history: &History) -> Vec<Value> {
    history.messages().unwrap().into_iter().map(|m| m["message"].clone()).collect()
}

/// The tokens always equal those of the rendered text, after any sequence of appends, cuts and continuations. A
/// cut at a message gives the history before that message; a cut inside an answer keeps the beginning of the
/// answer.
#[test]
fn histories_and_the_template_itself() {
    let tokenizer = Bytes { forgets: false };
    let none = Map::new();
    let text_of = |messages: &[Value]| tokenizer.render(messages, &none, false).unwrap();
    let mut history = History::of_messages(Map::new());
    let mut messages: Vec<Value> = Vec::new();
    for turn in 0..4 {
        let new = [message("system", "s"), message("user", &"u".repeat(turn))];
        history = history.with_messages(&tokenizer, &new).unwrap();
        messages.extend(new);
        assert_eq!(*history.tokens, tokenizer.encode(&text_of(&messages), false).unwrap(), "turn {turn}");
        let before = history.clone();
        history = history.with_answer(&tokenizer).unwrap();
        assert!(history.is_open());
        let from = history.tokens.len();
        Arc::make_mut(&mut history.tokens).extend(tokenizer.encode("yes, no", false).unwrap());
        // Cut while the answer is open, as a fork of a running session does.
        let part = history.cut(&tokenizer, Cut::Token(from + 3), "at").unwrap();
        assert_eq!(bodies(&part).last(), Some(&message("assistant", "yes")));
        assert!(part.is_open());
        // The end token is not kept; the template writes it.
        Arc::make_mut(&mut history.tokens).push(257);
        history.end_answer(&tokenizer, from, true, None).unwrap();
        messages.push(message("assistant", "yes, no"));
        assert_eq!(bodies(&history), messages);
        assert!(!history.is_open());
        assert_eq!(history.cut(&tokenizer, Cut::Message(messages.len() - 1), "to").unwrap(), before);
    }
    history = history.with_messages(&tokenizer, &[message("user", "end")]).unwrap();
    messages.push(message("user", "end"));
    for at in 0..=messages.len() {
        let cut = history.cut(&tokenizer, Cut::Message(at), "to").unwrap();
        assert_eq!(bodies(&cut), messages[..at]);
        let again = cut.with_messages(&tokenizer, &messages[at..]).unwrap();
        assert_eq!(again.tokens, history.tokens, "message {at}");
    }
    for at in 0..=history.tokens.len() {
        let cut = history.cut(&tokenizer, Cut::Token(at), "to").unwrap();
        assert_eq!(cut.tokens[..], history.tokens[..at]);
        let whole = bodies(&cut).len() - usize::from(cut.is_open());
        assert_eq!(bodies(&cut)[..whole], messages[..whole], "token {at}");
        let begins = cut.cut(&tokenizer, Cut::Message(whole), "to").unwrap();
        assert_eq!(
            *begins.tokens,
            tokenizer.encode(&text_of(&messages[..whole]), false).unwrap(),
            "token {at}"
        );
        assert!(!begins.has_tail());
        let further = begins.with_messages(&tokenizer, &messages[whole..]).unwrap();
        assert_eq!(further.tokens, history.tokens, "token {at}");
    }
    assert!(history.cut(&tokenizer, Cut::Token(history.tokens.len() + 1), "to").is_err());
    assert!(history.cut(&tokenizer, Cut::Message(messages.len() + 1), "to").is_err());
}

/// A template that rewrites earlier messages rewrites the history, and `in_common` shows it.
#[test]
fn templates_that_forget_rewrite() {
    let tokenizer = Bytes { forgets: true };
    let history =
        History::of_messages(Map::new()).with_messages(&tokenizer, &[message("user", "u")]).unwrap();
    let mut history = history.with_answer(&tokenizer).unwrap();
    let from = history.tokens.len();
    Arc::make_mut(&mut history.tokens).extend(tokenizer.encode("<think>hm</think>yes", false).unwrap());
    history.end_answer(&tokenizer, from, false, None).unwrap();
    let next = history.with_messages(&tokenizer, &[message("user", "v")]).unwrap();
    assert_eq!(next.in_common(&history), from, "what stood before the answer stays");
    let all = tokenizer.render(&bodies(&next), &Map::new(), false).unwrap();
    assert_eq!(*next.tokens, tokenizer.encode(&all, false).unwrap());
    assert!(!all.contains("hm") && bodies(&next)[1] == message("assistant", "<think>hm</think>yes"));
}

#[test]
fn a_stop_string_is_cut_out_of_a_token() {
    let tokenizer = Bytes { forgets: false };
    let mut history = History::of_tokens(tokenizer.encode("ab: one two", false).unwrap());
    history.end_answer(&tokenizer, 3, false, Some(" one")).unwrap();
    assert_eq!(tokenizer.decode(&history.tokens).unwrap(), "ab: one");
}

/// A stop string leaves the first letter of a token with several letters. Regression: the tokens were truncated
/// before the remainder was tokenized, so after a failure the history was shorter than what the client had
/// received.
#[test]
fn tokens_that_cannot_be_made_anew_stay() {
    struct Pairs(bool);
    impl HistoryTokenizer for Pairs {
        type Error = SessionError;

        fn render(&self, _: &[Value], _: &Map<String, Value>, _: bool) -> Result<String, SessionError> {
            Ok(String::new())
        }
        fn encode_rendered(&self, _: &str, _: bool) -> Result<Ends, SessionError> {
            Err(SessionError::InsideMessage)
        }
        fn encode(&self, text: &str, _: bool) -> Result<Vec<u32>, SessionError> {
            match self.0 {
                true => Err(SessionError::Halted),
                false => Ok(text.bytes().map(u32::from).collect()),
            }
        }
        /// Tokens from 256 on are two letters.
        fn decode(&self, tokens: &[u32]) -> Result<String, SessionError> {
            let letters = |t: &u32| if *t < 256 { vec![*t as u8] } else { vec![b'a', (t - 256) as u8] };
            Ok(tokens.iter().flat_map(letters).map(char::from).collect())
        }
        fn content(&self, answer: &str) -> String {
            answer.into()
        }
        fn max_tokens(&self) -> usize {
            usize::MAX
        }
    }
    let drawn = vec![u32::from(b':'), 256 + u32::from(b'b'), 256 + u32::from(b'c')];
    let mut history = History::of_tokens(drawn.clone());
    history.end_answer(&Pairs(true), 1, false, Some("aba")).unwrap_err();
    assert_eq!(*history.tokens, drawn);
    history.end_answer(&Pairs(false), 1, false, Some("aba")).unwrap();
    assert_eq!(*history.tokens, [drawn[0], drawn[1], u32::from(b'a')]);
}

/// The charge covers all memory: at most sixteen bytes per token of quota.
#[test]
fn what_no_token_shows_counts_too() {
    let tokenizer = Bytes { forgets: false };
    assert_eq!(History::of_tokens(vec![1; 70]).charge(), 70);
    assert_eq!(History::default().charge(), MIN_CHARGE);
    let wordy = History::of_messages(Map::new());
    let wordy =
        wordy.with_messages(&tokenizer, &[json!({"role": "user", "content": "", "name": "n".repeat(1600)})]);
    assert!(wordy.unwrap().charge() >= 100);
    let names = |n: usize| Map::from_iter([("a".to_string(), json!(vec![0; n]))]);
    let named = History::of_messages(names(1000));
    assert!(named.charge() as usize * 16 >= 1000 * size_of::<Value>(), "{}", named.charge());
    let grown = named.with_messages(&tokenizer, &[message("user", "u")]).unwrap();
    assert!(grown.charge() > named.charge(), "they stay counted");
    // Clones share memory until one of them is changed.
    let copy = grown.clone();
    assert!(Arc::ptr_eq(&copy.tokens, &grown.tokens));
    let (Some(a), Some(b)) = (&copy.rendered, &grown.rendered) else { panic!("made of messages") };
    assert!(Arc::ptr_eq(a, b));
    let cut = copy.cut(&tokenizer, Cut::Message(0), "to").unwrap();
    assert_eq!((cut.tokens.len(), bodies(&grown).len()), (0, 1));
    let Some(of_cut) = &cut.rendered else { panic!("made of messages") };
    assert!(Arc::ptr_eq(&of_cut.kwargs, &a.kwargs), "names are never copied");
}
