// The names that math.js knows, as data: what each is drawn as.

/** "name ⟨character⟩ name ⟨character⟩ …" */
function pairs(text) {
  const words = text.trim().split(/\s+/);
  return Object.fromEntries(words.flatMap((word, at) => (at % 2 ? [] : [[word, words[at + 1]]])));
}

export const LETTERS = pairs(`
  alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ omicron ο
  pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
  Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
  infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ imath ı jmath ȷ Re ℜ Im ℑ aleph ℵ emptyset ∅ varnothing ∅ top ⊤ bot ⊥ angle ∠ degree °
  forall ∀ exists ∃ nexists ∄ prime ′ square □ blacksquare ■ triangle △ checkmark ✓`);

export const OPERATORS = pairs(`
  times × div ÷ cdot ⋅ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ wedge ∧ land ∧ vee ∨ lor ∨ neg ¬ lnot ¬
  cap ∩ cup ∪ setminus ∖ backslash ∖ uplus ⊎ sqcup ⊔ dagger † amalg ⨿
  le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾ lt < gt > ne ≠ neq ≠ ll ≪ gg ≫ equiv ≡ approx ≈ cong ≅ simeq ≃ sim ∼ propto ∝ doteq ≐
  prec ≺ succ ≻ preceq ⪯ succeq ⪰ lesssim ≲ gtrsim ≳ asymp ≍ triangleq ≜ coloneqq ≔
  in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ subsetneq ⊊ supset ⊃ supseteq ⊇ sqsubseteq ⊑ mid ∣ nmid ∤ parallel ∥ perp ⊥ vdash ⊢ models ⊨
  to → rightarrow → gets ← leftarrow ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ Leftarrow ⇐ impliedby ⟸ Leftrightarrow ⇔ iff ⟺ mapsto ↦
  longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ uparrow ↑ downarrow ↓ updownarrow ↕ hookrightarrow ↪ rightharpoonup ⇀ rightleftharpoons ⇌ nearrow ↗ searrow ↘
  sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ oint ∮ bigcup ⋃ bigcap ⋂ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂
  ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ dotsc … dotsb ⋯ colon : therefore ∴ because ∵ surd √ lbrace { rbrace } vert | Vert ‖ lbrack [ rbrack ]
  langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉`);

export const DELIMITERS = pairs(`lvert | rvert | lVert ‖ rVert ‖ lbrace { rbrace } lgroup ⟮ rgroup ⟯`);

export const SPACES = { ",": "0.17em", ":": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.33em", quad: "1em", qquad: "2em", thinspace: "0.17em", enspace: "0.5em", space: "0.33em" };

export const FUNCTIONS = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker deg gcd hom lim limsup liminf max min sup inf
  arg Pr`.split(/\s+/));

/** [mark, whether it stands below] */
export const ACCENTS = {
  hat: ["^"], widehat: ["^"], bar: ["‾"], overline: ["‾"], vec: ["→"], overrightarrow: ["→"], overleftarrow: ["←"], dot: ["˙"], ddot: ["¨"], tilde: ["~"], widetilde: ["~"],
  check: ["ˇ"], breve: ["˘"], acute: ["´"], grave: ["`"], mathring: ["˚"], overbrace: ["⏞"], underbrace: ["⏟", true], underline: ["_", true],
};

export const FONTS = {
  mathrm: "plain", mathit: "italic", mathbf: "bold", boldsymbol: "bold", bm: "bold", mathbb: "double", mathcal: "script", mathscr: "script",
  mathfrak: "fraktur", mathsf: "sans", mathtt: "mono", mathnormal: "italic",
};

/** Where Unicode's alphabets begin: A, a, 0. */
const ALPHABETS = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce], script: [0x1d49c, 0x1d4b6], fraktur: [0x1d504, 0x1d51e], double: [0x1d538, 0x1d552, 0x1d7d8],
  sans: [0x1d5a0, 0x1d5ba, 0x1d7e2], mono: [0x1d670, 0x1d68a, 0x1d7f6], italic: [0x1d434, 0x1d44e],
};
const BEFORE_UNICODE = { // letters that had a place already
  script: pairs("B ℬ E ℰ F ℱ H ℋ I ℐ L ℒ M ℳ R ℛ e ℯ g ℊ o ℴ"), fraktur: pairs("C ℭ H ℌ I ℑ R ℜ Z ℨ"), double: pairs("C ℂ H ℍ N ℕ P ℙ Q ℚ R ℝ Z ℤ"), italic: pairs("h ℎ"),
};
const RANGES = ["A", "a", "0"].map((first) => first.codePointAt(0));

export function styled(text, font) {
  return Array.from(text, (letter) => styledLetter(letter, font)).join("");
}

function styledLetter(letter, font) {
  const early = BEFORE_UNICODE[font]?.[letter];
  const range = /[A-Z]/.test(letter) ? 0 : /[a-z]/.test(letter) ? 1 : /[0-9]/.test(letter) ? 2 : -1;
  const base = ALPHABETS[font]?.[range];
  return early ?? (base ? String.fromCodePoint(base + letter.codePointAt(0) - RANGES[range]) : letter);
}
