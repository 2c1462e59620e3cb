//! A Rust source taken apart, as far as the checks need it: what is code and what is comment.

/// One source, split by line. Each line has the same number in both.
#[derive(Debug)]
pub(super) struct RustSource {
    /// Code without comments and without what stands in quotes.
    pub(super) code: Vec<String>,
    /// Comments, documentation included.
    pub(super) comments: Vec<String>,
}

impl RustSource {
    pub(super) fn parse(text: &str) -> Self {
        let mut splitter = Splitter { rest: text, code: String::new(), comments: String::new() };
        splitter.run();
        let lines = |text: String| text.split('\n').map(str::to_owned).collect();
        Self { code: lines(splitter.code), comments: lines(splitter.comments) }
    }

    /// Numbers, from 0, of the lines whose code has `word` as a word of its own.
    pub(super) fn lines_with_word(&self, word: &str) -> Vec<usize> {
        let has = |line: &String| {
            line.match_indices(word).any(|(at, _)| {
                let is_part = |char: Option<char>| char.is_some_and(is_word);
                !is_part(line[..at].chars().next_back())
                    && !is_part(line[at + word.len()..].chars().next())
            })
        };
        (0..self.code.len()).filter(|&number| has(&self.code[number])).collect()
    }

    /// Whether a comment on the line, or right above the statement that the line belongs to, has
    /// `mark`.
    pub(super) fn is_marked(&self, line: usize, mark: &str) -> bool {
        for number in (0..=line).rev() {
            if self.comments[number].contains(mark) {
                return true;
            }
            let Some(above) = number.checked_sub(1) else { break };
            let code = self.code[above].trim();
            let ends_a_statement = code.ends_with([';', '{', '}', ',']);
            let is_blank = code.is_empty() && self.comments[above].trim().is_empty();
            if is_blank || (ends_a_statement && !self.comments[above].contains(mark)) {
                break;
            }
        }
        false
    }
}

fn is_word(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

struct Splitter<'a> {
    rest: &'a str,
    code: String,
    comments: String,
}

impl<'a> Splitter<'a> {
    fn run(&mut self) {
        while let Some(char) = self.rest.chars().next() {
            if self.rest.starts_with("//") {
                let end = self.rest.find('\n').unwrap_or(self.rest.len());
                self.comment(end);
            } else if self.rest.starts_with("/*") {
                self.comment(block_comment(self.rest));
            } else if let Some(length) = self.raw_string() {
                self.quoted(length);
            } else if char == '"' {
                self.quoted(closing_quote(self.rest, '"'));
            } else if char == '\'' && is_char_literal(self.rest) {
                self.quoted(closing_quote(self.rest, '\''));
            } else {
                self.code(char.len_utf8());
            }
        }
    }

    /// Length of the raw string that starts here, or `None`.
    fn raw_string(&self) -> Option<usize> {
        if self.code.chars().next_back().is_some_and(is_word) && !self.after_prefix() {
            return None;
        }
        let hashes = self.rest.strip_prefix('r')?;
        let count = hashes.len() - hashes.trim_start_matches('#').len();
        let body = hashes[count..].strip_prefix('"')?;
        let end = format!("\"{}", "#".repeat(count));
        let inner = body.find(&end).map_or(body.len(), |at| at + end.len());
        Some(self.rest.len() - body.len() + inner)
    }

    /// Whether the code so far ends in the `b` or `c` of a byte or C string.
    fn after_prefix(&self) -> bool {
        let mut chars = self.code.chars().rev();
        matches!(chars.next(), Some('b' | 'c')) && !chars.next().is_some_and(is_word)
    }

    fn code(&mut self, length: usize) {
        let text = self.take(length);
        self.code.push_str(text);
        self.comments.extend(text.chars().filter(|&char| char == '\n'));
    }

    fn comment(&mut self, length: usize) {
        let text = self.take(length);
        self.comments.push_str(text);
        self.code.extend(text.chars().filter(|&char| char == '\n'));
    }

    fn quoted(&mut self, length: usize) {
        let text = self.take(length);
        self.code.push_str("\"\"");
        for text_of in [&mut self.code, &mut self.comments] {
            text_of.extend(text.chars().filter(|&char| char == '\n'));
        }
    }

    fn take(&mut self, length: usize) -> &'a str {
        let (text, rest) = self.rest.split_at(length);
        self.rest = rest;
        text
    }
}

/// Length of the comment at the start, which may hold others.
fn block_comment(text: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// Length of the literal at the start, its quotes included.
fn closing_quote(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, char) in text.char_indices().skip(1) {
        match char {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if char == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Whether a `'` starts a character and not a lifetime.
fn is_char_literal(text: &str) -> bool {
    let mut chars = text.chars().skip(1);
    match (chars.next(), chars.next()) {
        (Some('\\'), _) => true,
        (Some(_), Some(second)) => second == '\'',
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_quotes_are_no_code() {
        let source = RustSource::parse(
            "let a = \"unsafe // no comment\"; // unsafe\n/* unsafe /* nested */ unsafe */ b();\n",
        );
        assert_eq!(source.lines_with_word("unsafe"), Vec::<usize>::new());
        assert_eq!(source.code[0].trim(), "let a = \"\";");
        assert_eq!(source.comments[0], "// unsafe");
        assert_eq!(source.code[1].trim(), "b();");
    }

    #[test]
    fn raw_strings_characters_and_lifetimes_are_told_apart() {
        let text = "f(r#\"a \" unsafe\"#, br\"unsafe\", '\"', '\\'', b'x'); fn g<'a>(x: &'a str) { unsafe {} }\nlet r = other; let bar = 'u';";
        let source = RustSource::parse(text);
        assert_eq!(source.lines_with_word("unsafe"), [0]);
        assert!(source.code[0].contains("fn g<'a>(x: &'a str)"));
        assert!(source.code[1].contains("let bar = "));
    }

    #[test]
    fn lines_keep_their_numbers_across_long_literals() {
        let source =
            RustSource::parse("let a = \"one\ntwo\nthree\";\nunsafe {}\n/* a\nb */\nlast();");
        assert_eq!(source.lines_with_word("unsafe"), [3]);
        assert_eq!(source.lines_with_word("last"), [6]);
        assert_eq!(source.code.len(), source.comments.len());
    }

    #[test]
    fn words_are_whole() {
        let source = RustSource::parse("#![forbid(unsafe_code)]\nunsafely();\nunsafe{}");
        assert_eq!(source.lines_with_word("unsafe"), [2]);
    }

    #[test]
    fn mark_counts_right_above_the_statement_only() {
        let source = RustSource::parse(
            "// SAFETY: it is ours.\nlet x =\n    unsafe { a() };\nlet y = unsafe { b() };\n\n// SAFETY: far\n\nunsafe { c() }\nunsafe { d() } // SAFETY: here\n",
        );
        assert!(source.is_marked(2, "SAFETY:"));
        assert!(!source.is_marked(3, "SAFETY:"));
        assert!(!source.is_marked(7, "SAFETY:"));
        assert!(source.is_marked(8, "SAFETY:"));
    }

    #[test]
    fn unfinished_sources_end() {
        for text in ["\"open", "/* open", "r#\"open", "'", "'\\", "b'", "r#", ""] {
            let source = RustSource::parse(text);
            assert_eq!(source.code.len(), source.comments.len(), "{text}");
        }
    }
}
