"""What the target is asked when it writes training data: requests filled from slots, and scripts of whole conversations.

A request is a template with slots, `{pool}` for a phrase of POOLS and `{3-20}` for a number (`{10-90/5}` for a multiple); a pool named twice in one template gives the same
phrase, with a digit (`{name2}`) another one. Requests for code carry examples that were computed, so that they are true. Half of all documents have no request of ours: the
target invents the user's turn from the bare chat prefix. All texts were written for this file; none is from an evaluation set.
"""

# ruff: noqa: E501, SIM905 - tables of text: one template a line, phrases as they are read

import random
import re
from collections.abc import Callable
from typing import Any

USER, ANSWER, END = -1, -2, -3  # script entries below 0: sample a user turn, sample an answer, stop

TEMPERATURES = ((0.0, 0.40), (0.6, 0.15), (1.0, 0.45))  # of the answers, with their shares
INVENTED_SHARE = 0.45  # documents whose user turn the target invents
SECOND_TURN_SHARE = 0.15
KIND_SHARES = (("math", 0.30), ("code", 0.30), ("chat", 0.40))  # of our own requests
SENTINEL = "\u241e"

POOLS: dict[str, list[str]] = {
    "name": "Mara Tobias Priya Kenji Lucia Omar Freya Daniel Aisha Victor Nina Samuel Ingrid Mateo Chloe Yusuf Hana Leon Grace Pavel Zoe Ivan Amara Felix".split(),
    "thing": "marbles,stickers,notebooks,candles,postcards,buttons,seashells,pencils,tickets,balloons,bricks,bottles,photos,bolts,badges".split(","),
    "food": "muffins,oranges,sandwiches,cookies,dumplings,pretzels,pears,bagels,tomatoes,cupcakes,mangoes,waffles".split(","),
    "place": "library,bakery,school,factory,museum,hotel,farm,garage,theater,hospital,bookshop,nursery".split(","),
    "city": "Lisbon,Nairobi,Kyoto,Montreal,Oslo,Lima,Prague,Hanoi,Denver,Seville,Auckland,Istanbul,Chicago,Tallinn,Cairo".split(","),
    "job": "nurse,carpenter,data analyst,chef,high-school teacher,pilot,architect,accountant,librarian,marine biologist,electrician,journalist,product manager".split(","),
    "animal": "otters,octopuses,bees,elephants,crows,wolves,sea turtles,hummingbirds,bats,penguins,ants,horses".split(","),
    "science": (
        "photosynthesis,plate tectonics,osmosis,black holes,the water cycle,natural selection,electromagnetic induction,vaccines,nuclear fusion,entropy,"
        "the greenhouse effect,chemical equilibrium,DNA replication,superconductivity,tides,antibiotic resistance,radioactive decay,the Doppler effect,mitosis,ocean acidification,"
        "catalysts,refraction,the immune response,Newton's third law,semiconductors,the carbon cycle,black-body radiation,enzymes,gravitational waves,buoyancy"
    ).split(","),
    "tech": (
        "recursion,hash tables,neural networks,public-key encryption,TCP and UDP,version control,garbage collection,database indexes,binary search,machine learning,operating systems,"
        "compilers,cloud computing,blockchains,load balancing,unit testing,object-oriented programming,dynamic programming,search engines,virtual memory"
    ).split(","),
    "humanities": (
        "the French Revolution,the Silk Road,the Renaissance,stoicism,the Industrial Revolution,the Cold War,utilitarianism,the fall of the Roman Empire,impressionism,"
        "the printing press,Greek tragedy,the abolition of slavery,existentialism,the Magna Carta,the Meiji Restoration,social contract theory,romantic poetry,the Black Death,"
        "supply and demand,inflation,the separation of powers,comparative advantage,game theory,the Bretton Woods system,oral traditions,the Ottoman Empire"
    ).split(","),
    "hobby": "gardening,chess,watercolor painting,long-distance running,baking bread,birdwatching,learning the guitar,hiking,photography,knitting,camping,woodworking".split(","),
    "product": "a reusable water bottle,noise-cancelling headphones,a language-learning app,an electric bicycle,a meal-kit service,a smart lamp,a travel backpack,a budgeting app".split(","),
    "role": (
        "a patient math tutor,a medieval blacksmith,a ship's navigator in 1750,a friendly travel guide,a strict but fair editor,a detective in a rainy city,a robot who has just learned to feel,"
        "a sports commentator,an experienced interviewer,a museum curator,a startup founder,a grandmother who tells stories,a science-fiction captain,a career coach"
    ).split(","),
    "tone": "formal,cheerful,concise,persuasive,apologetic,enthusiastic,neutral,warm,humorous,diplomatic".split(","),
    "person": "my manager,a new colleague,a landlord,a customer whose parcel is late,my professor,an old friend,the head of a charity,a job recruiter,my neighbors,a supplier".split(","),
    "matter": (
        "asking for a day off,moving a meeting to next week,reporting a broken heater,thanking them for their help,requesting feedback on a draft,declining an invitation,announcing a new project,"
        "following up after an interview,proposing a partnership,asking for an extension of a deadline,inviting them to a small party,explaining a mistake in an invoice"
    ).split(","),
    "story": "a lost letter,an unexpected friendship,the last tree in a city,a clock that runs backwards,a night train,a promise kept too late,two rival bakers,a lighthouse,an invisible door".split(","),
    "audience": "a ten-year-old,a university student,someone without a technical background,a busy executive,a curious teenager,a beginner".split(","),
    "plan": (
        "a three-day trip to {city},a weekly study schedule,a birthday dinner for eight people,a beginner's workout,a small vegetable garden,a fundraising event,a move to {city},"
        "a presentation about {science},a month of healthy lunches,a podcast about {hobby}"
    ).split(","),
    "debate": (
        "remote work,school uniforms,a four-day working week,public transport without fares,nuclear energy,social media for children,zoos,homework,space exploration,self-driving cars,"
        "cash-free shops,a universal basic income,exams without grades"
    ).split(","),
    "object": "stack,queue,bank account,shopping cart,text editor,parking lot,playlist,temperature log,library catalog,matrix,tic-tac-toe board,inventory,timer,graph,linked list".split(","),
    "lang": "JavaScript,Java,C++,Go,Rust,SQL,Bash,TypeScript".split(","),
}  # fmt: skip

MATH = [
    "{name} buys {3-12} boxes of {thing} with {6-24} in each box and gives {5-15} of them to {name2}. How many {thing} does {name} have left?",
    "A {place} sells {food} for ${2-9} each. On Monday it sold {20-90} of them and on Tuesday {5-15} fewer. How much money did it take in over the two days?",
    "{name} runs {3-9} kilometers every weekday and {10-18} kilometers on Saturday. How many kilometers does {name} run in {2-6} weeks?",
    "A train leaves {city} at {45-95} km/h and drives for {2-6} hours, then continues at {50-110} km/h for {2-5} more hours. How far does it travel in all?",
    "{name} earns ${12-35} an hour and works {5-9} hours a day, {4-6} days a week. If {name} saves {10-50/10}% of the pay, how much is saved in {2-8} weeks?",
    "There are {120-480/20} seats in a theater. {40-70/10}% are taken by adults and {20-45} by children. How many seats are empty?",
    "{name} is {3-9} years older than {name2}, and {name2} is twice as old as {name3}. If {name3} is {6-19} years old, what is the sum of their three ages?",
    "A recipe for {8-24} {food} needs {2-6} cups of flour. How many cups are needed for {48-144/12} {food}?",
    "A jacket costs ${40-160/10}. It is marked down by {10-40/5}%, and a coupon takes off another ${3-12}. What is the final price?",
    "{name} has {20-60} {thing}, {name2} has {2-4} times as many, and {name3} has {5-18} fewer than {name2}. How many {thing} do they have together?",
    "A water tank holds {300-900/50} liters. One pipe fills it with {8-20} liters a minute, and a leak loses {2-6} liters a minute. How many liters are in the tank after {10-25} minutes if it starts empty?",
    "A class of {20-36} students votes for a trip. Half of them choose the zoo, a quarter choose the museum, and the rest stay undecided. How many are undecided?",
    "{name} reads {15-40} pages a day of a book with {300-700/10} pages. After {4-9} days, how many pages remain?",
    "A farmer plants {6-20} rows of {10-30} trees. {5-30/5} of the trees die in the winter, and each of the others gives {8-40} apples. How many apples are there?",
    "The perimeter of a rectangle is {40-120/4} cm and its width is {4-9} cm. What is its area?",
    "{name} and {name2} share ${60-360/12} in the ratio {1-4}:{2-5}. How much does each of them get?",
    "A phone plan costs ${10-30} a month plus {5-25} cents for each message. What does {name} pay for {3-9} months with {20-90/10} messages a month?",
    "Tickets cost ${6-14} for adults and ${3-5} for children. A group of {8-20} people with {3-6} children visits. What do they pay?",
    "The average of {name}'s first {3-5} test scores is {70-90}. What score is needed on the next test for an average of {75-92}?",
    "What is {11-99} * {11-99} - {100-900}?",
    "Solve for x: {2-9}x + {3-40} = {45-99}.",
    "Find the roots of x^2 - {5-15}x + {4-36} = 0.",
    "If f(x) = {2-7}x^2 - {1-9}x + {1-20}, what is f({2-8})?",
    "A bag holds {3-9} red, {3-9} blue and {2-8} green balls. What is the probability of drawing {2-2} blue balls in a row without putting the first one back?",
    "How many different ways are there to choose {2-4} of {6-11} {thing}?",
    "A car uses {5-9} liters of fuel for 100 km. Fuel costs ${1-2}.{10-95} a liter. What does a trip of {150-800/10} km cost?",
    "A right triangle has legs of {3-15} cm and {4-20} cm. What are its hypotenuse and its area?",
    "{name} puts ${200-2000/100} into an account that pays {2-8}% interest, compounded yearly. How much is there after {2-4} years?",
]
MATH_ENDINGS = [
    ("\nPlease reason step by step, and put your final answer within \\boxed{}.", 6),
    ("\nThink step by step and give the result in \\boxed{}.", 2),
    ("", 3),
    (" Show your work.", 1),
    (" Explain each step, then write the answer on a line of its own.", 1),
]

CHAT = [
    "Explain {science} to {audience}.", "What is {science}, and why does it matter?", "How does {tech} work? Give an example.", "What are the main ideas behind {tech}?",
    "Summarize the causes and effects of {humanities}.", "Why was {humanities} important? Answer in {2-4} paragraphs.", "Compare {tech} and {tech2}.",
    "What is the difference between {science} and {science2}?", "List {3-10} interesting facts about {animal}.", "List {3-8} tips for {hobby}.", "Give me {3-7} ideas for a gift for a {job} who likes {hobby}.",
    "Write a {tone} email to {person} {matter}.", "Draft a short, {tone} message to {person} {matter}.", "Write a short story about {story}.", "Write a poem about {story} in {2-5} stanzas.",
    "Write a blog post about {hobby} for {audience}.", "Write a product description for {product}. Keep it {tone}.", "Suggest {3-6} slogans for {product}.",
    "You are {role}. Introduce yourself and tell me about {hobby}.", "Pretend to be {role} and answer: what is the hardest part of your day?", "Act as {role}. I want your advice on {plan}.",
    "Plan {plan}.", "Help me plan {plan} with a budget of ${50-900/50}.", "What are the advantages and disadvantages of {debate}?", "Argue for and against {debate}, then give your own view.",
    "Write the opening of a speech about {debate}.", "What questions should I ask in an interview for a position as a {job}?", "Describe a typical day of a {job} in {city}.",
    "What should I see in {city} in {2-5} days?", "Create a quiz of {3-6} questions about {humanities}, with answers.", "Make a table that compares {debate} and {debate2} by cost, benefit and risk.",
    "Outline an essay on {humanities}.", "Give three real-life examples of {science}.", "How would you teach {tech} to {audience}?", "Write a dialogue between a {job} and {role} about {debate}.",
    "What would happen if there were no {animal}?", "Who were the key figures of {humanities}, and what did they do?", "Imagine that you discover {story}. Describe what you see, hear and feel.",
    "Rewrite this sentence in a {tone} tone: \"{sentence}\"", "Correct the grammar: \"{broken}\"", "Turn these notes into a paragraph: {notes}", "Summarize this text in {1-3} sentences:\n\n{passage}",
    "Read the text and answer the question.\n\n{passage}\n\nQuestion: What happened, and who was involved?", "List all names, places and numbers in the following text as JSON.\n\n{passage}",
    "Is the mood of this review positive or negative, and why?\n\n\"{review}\"", "Translate the key points of this text into {2-4} bullet points:\n\n{passage}", "Write a headline for this news item:\n\n{passage}",
    "Three friends, {name}, {name2} and {name3}, finish a race. {name} is faster than {name2} and slower than {name3}. Who is last? Explain.",
    "If all {thing} in a box are either red or blue, and {3-9} of {10-20} are red, what can you say about the blue ones?", "How can a {job} use {tech} at work?",
    "What does a beginner need to know about {hobby}?", "Explain how to write a simple program about a {object} in {lang}.", "Which is better for {audience}: {hobby} or {hobby2}? Give reasons.",
]  # fmt: skip
POOLS |= {
    "sentence": ["We need the report for the {place} by Friday.", "Your order of {thing} is late.", "The {job} said that {hobby} is a waste of time.", "Send me the numbers now.", "I think {debate} is a bad idea."],
    "broken": ["She don't like {food} because they is too sweet.", "Yesterday I go to the {place} and seen {name} there.", "Me and {name} was talking about {hobby} since two hours.", "There is many reason for learn {tech}."],
    "notes": ["{city}, {3-9} days, {hobby}, good food, rain; {name} lost a bag", "new {place}, opens in May, {10-80} jobs, funded by {name} {name2}", "{animal}, fewer each year, cause unknown, {job} wants to help"],
    "review": ["I bought {product} last month. It arrived {2-9} days late, but it works better than I had hoped.", "{product} looks nice, and that is all. After {2-6} weeks it stopped working, and nobody answers my emails.", "The {place} in {city} was crowded, yet {name} at the desk was so kind that we will come back."],
    "passage": [
        "On Tuesday the {place} in {city} opened again after {2-9} months of repairs. {name}, a {job}, said that about {100-900/50} visitors came on the first day. The work cost ${2-9} million, and a second building is planned for next year.",
        "{name} had kept {animal} for {3-20} years before a storm destroyed the shelter. Neighbors brought {thing}, {food} and money, and within {2-8} weeks a new one stood. \"I did not know that I had so many friends,\" {name} said. A local {job} drew the plans without pay.",
        "A study by researchers in {city} followed {200-900/50} people who took up {hobby}. After {2-8} months, {40-80/5}% of them slept better, while {5-20}% gave up in the first week. {name}, who led the study, warns that the group was small and that the effect may not last.",
        "The company behind {product} said on Monday that it will cut {20-200/10} jobs in {city} and open a smaller office in {city2}. Sales fell by {5-30}% last year. {name}, its founder, expects growth again within {2-4} years.",
    ],
}  # fmt: skip

FOLLOW_UPS = [
    "Can you make that shorter?", "Give me an example.", "Why?", "Now explain it to {audience}.", "Rewrite your answer in a more {tone} tone.", "What is the most important point?",
    "Can you add {2-4} more?", "Are you sure? Check your answer.", "Now do the same for {topic}.", "Turn that into a list.", "What could go wrong?", "Summarize this in one sentence.",
]  # fmt: skip
POOLS["topic"] = POOLS["science"] + POOLS["tech"] + POOLS["humanities"]

FILTERS: list[tuple[str, str, Callable[[int], bool]]] = [
    ("even", "even numbers", lambda x: x % 2 == 0), ("odd", "odd numbers", lambda x: x % 2 == 1), ("positive", "positive numbers", lambda x: x > 0),
    ("negative", "negative numbers", lambda x: x < 0), ("two_digit", "numbers with exactly two digits", lambda x: 10 <= abs(x) < 100),
    ("multiples_of_three", "multiples of three", lambda x: x % 3 == 0), ("prime", "prime numbers", lambda x: x > 1 and all(x % d for d in range(2, x))),
    ("square", "perfect squares", lambda x: x >= 0 and round(x**0.5) ** 2 == x), ("small", "numbers below ten", lambda x: x < 10),
]  # fmt: skip
REDUCERS: list[tuple[str, str, str, Callable[[list[int]], Any]]] = [
    ("sum_of", "the sum of the", "int", sum), ("count", "how many", "int", len), ("largest", "the largest of the", "Optional[int]", lambda x: max(x, default=None)),
    ("list_of", "a list of the", "List[int]", list), ("squares_of", "the squares of the", "List[int]", lambda x: [v * v for v in x]), ("sorted", "a sorted list of the", "List[int]", sorted),
    ("unique", "a sorted list without repetitions of the", "List[int]", lambda x: sorted(set(x))), ("reversed", "in reverse order the", "List[int]", lambda x: x[::-1]),
    ("running_sum_of", "the running sums of the", "List[int]", lambda x: [sum(x[: i + 1]) for i in range(len(x))]), ("range_of", "the difference between the largest and the smallest of the", "int", lambda x: max(x, default=0) - min(x, default=0)),
]  # fmt: skip
STRINGS: list[tuple[str, str, str, Callable[[str], Any]]] = [
    ("count_vowels", "Count the vowels in the text.", "int", lambda s: sum(c in "aeiou" for c in s)), ("longest_word", "Find the longest word; the first one if there are several.", "str", lambda s: max(s.split(), key=len)),
    ("reverse_words", "Reverse the order of the words.", "str", lambda s: " ".join(s.split()[::-1])), ("capitalize_words", "Make the first letter of every word a capital.", "str", str.title),
    ("letter_counts", "Count how often every letter occurs.", "Dict[str, int]", lambda s: {c: s.count(c) for c in dict.fromkeys(s) if c != " "}), ("initials", "Return the first letters of the words, as one string.", "str", lambda s: "".join(w[0] for w in s.split())),
    ("word_lengths", "Return the length of every word.", "List[int]", lambda s: [len(w) for w in s.split()]), ("remove_vowels", "Remove all vowels.", "str", lambda s: "".join(c for c in s if c not in "aeiou")),
    ("is_palindrome", "Check whether the text reads the same in both directions when spaces are ignored.", "bool", lambda s: s.replace(" ", "") == s.replace(" ", "")[::-1]),
    ("swap_ends", "Exchange the first and the last character.", "str", lambda s: s[-1] + s[1:-1] + s[0]), ("double_letters", "Repeat every letter once.", "str", lambda s: "".join(c if c == " " else 2 * c for c in s)),
    ("sort_words", "Sort the words by their length, and words of one length by the alphabet.", "List[str]", lambda s: sorted(s.split(), key=lambda w: (len(w), w))), ("first_repeated", "Return the first letter that occurs twice, or an empty string.", "str", lambda s: next((c for i, c in enumerate(s) if c != " " and c in s[:i]), "")),
    ("count_words_with", "Count the words that contain the letter e.", "int", lambda s: sum("e" in w for w in s.split())), ("squeeze", "Remove all spaces and repeated neighboring letters.", "str", lambda s: "".join(c for i, c in enumerate(s.replace(" ", "")) if not i or c != s.replace(" ", "")[i - 1])),
]  # fmt: skip
WORDS = "river stone apple level cloud paper green noon table mirror radar small window eleven civic bottle letter amber kayak summer planet refer orange tree".split()
CODE_TASKS = [
    "checks whether a number is prime", "computes the n-th Fibonacci number without recursion", "merges two sorted lists", "reverses a linked list", "finds the second largest value in a list", "counts the words in a file",
    "converts Celsius to Fahrenheit and back", "validates an email address", "flattens a nested list", "computes the greatest common divisor", "rotates a matrix by ninety degrees", "checks whether brackets are balanced",
    "removes duplicates from a list and keeps the order", "sorts a list with quicksort", "searches a sorted list with binary search", "converts a Roman numeral to an integer", "generates all permutations of a string",
    "groups words that are anagrams", "computes the factorial of a number", "transposes a matrix", "finds the longest common prefix of some words", "computes the median of a list", "encodes a text with a Caesar cipher",
    "counts the islands in a grid", "returns the most common element of a list", "sums the digits of a number", "parses a CSV line", "reads a JSON file and prints its keys", "finds all pairs with a given sum", "computes the edit distance of two words",
    "prints a multiplication table", "splits a list into chunks of size n", "converts a number to binary", "draws a pyramid of stars", "implements bubble sort", "checks whether a year is a leap year", "retries a failing function with a delay", "caches the results of a function",
]  # fmt: skip
CODE_FORMS = [
    "Write a Python function that {task}.", "Implement a Python function that {task}. Include a docstring and type hints.", "How do I write a function in Python that {task}?", "Write a function that {task} in {lang}.",
    "Write a Python function that {task}, then explain how it works.", "Give me Python code that {task}, with two example calls.", "Write a Python program that {task} and add tests for it.",
    "Design a Python class for a {object}.", "Write a Python class {object} with methods to add, remove and list its elements.", "Explain what time complexity is, using a function that {task}.",
    "I have a Python function that {task}, but it is slow. How can I make it faster?",
]  # fmt: skip
POOLS["task"] = CODE_TASKS
STUB_FORMS = [
    "Complete the following Python function so that it passes its tests:\n```python\n{stub}```", "Write a solution to this problem and make sure that it passes the tests:\n```python\n{stub}```", "```python\n{stub}```\nFill in the body of this function.",
    "Here is the start of a function. Finish it.\n\n```python\n{stub}```", "Please implement the function below. Return the whole function.\n\n```python\n{stub}```", "Complete this code:\n{stub}", "Solve the following programming task in Python.\n```python\n{stub}```\nThe solution should pass all tests.",
]  # fmt: skip

SLOT = re.compile(r"\{(?:(\d+)-(\d+)(?:/(\d+))?|([a-z]+)\d?)\}")


def fill(template: str, rng: random.Random) -> str:
    """Fill the slots of a template, and those of what was filled in."""
    chosen: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        low, high, step, pool = match.groups()
        if pool is None:
            return str(rng.randrange(int(low), int(high) + 1, int(step or 1)))
        if match.group() not in chosen:
            free = [phrase for phrase in POOLS[pool] if phrase not in chosen.values()]
            chosen[match.group()] = SLOT.sub(value, rng.choice(free))
        return chosen[match.group()]

    return SLOT.sub(value, template)


def stub(rng: random.Random) -> str:
    """Head of a Python function: signature, docstring and two computed examples."""
    if rng.random() < 0.6:
        (suffix, which, keep), (prefix, what, returns, reduce) = rng.choice(FILTERS), rng.choice(REDUCERS)
        name, argument = f"{prefix}_{suffix}", rng.choice(["numbers", "values", "nums", "items", "data"])
        signature, purpose = f"{argument}: List[int]", f"Return {what} {which} in {argument}."
        inputs: list[Any] = [[rng.randint(-20, 40) for _ in range(rng.randint(3, 6))] for _ in range(2)]
        results = [reduce([x for x in numbers if keep(x)]) for numbers in inputs]
    else:
        name, purpose, returns, compute = rng.choice(STRINGS)
        signature = f"{rng.choice(['text', 's', 'sentence', 'phrase'])}: str"
        inputs = [" ".join(rng.sample(WORDS, rng.randint(1, 3))) for _ in range(2)]
        results = [compute(text) for text in inputs]
    typing = sorted(set(re.findall(r"List|Dict|Optional", signature + returns)))
    head = f"from typing import {', '.join(typing)}\n\n\n" if typing else ""
    if rng.random() < 0.5:
        cases = "".join(
            f"    >>> {name}({value!r})\n    {result!r}\n" for value, result in zip(inputs, results, strict=True)
        )
    else:
        cases = "".join(f"    {name}({value!r}) == {result!r}\n" for value, result in zip(inputs, results, strict=True))
    return f'{head}def {name}({signature}) -> {returns}:\n    """{rng.choice(["", " "])}{purpose}\n{cases}    """\n'


def request(rng: random.Random) -> str:
    """One user turn."""
    kind = rng.choices([kind for kind, _ in KIND_SHARES], [share for _, share in KIND_SHARES])[0]
    if kind == "math":
        ending = rng.choices([ending for ending, _ in MATH_ENDINGS], [weight for _, weight in MATH_ENDINGS])[0]
        return fill(rng.choice(MATH), rng) + ending
    if kind == "chat":
        return fill(rng.choice(CHAT), rng)
    if rng.random() < 0.35:
        return fill(rng.choice(CODE_FORMS), rng)
    return rng.choice(STUB_FORMS).replace("{stub}", stub(rng))


class ScriptWriter:
    """Scripts of documents: token ids, with USER and ANSWER where the target samples until its stop token.

    The stop token that ends a sampled turn is itself part of the chat template, so the forced tokens behind it go on after it.
    """

    def __init__(self, tokenizer: Any, seed: int, max_script: int) -> None:
        """Split the tokenizer's chat template into its pieces.

        Raises:
            ValueError: there is no chat template, or turns do not end in the tokenizer's end token.
        """
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError(
                "the target's tokenizer has no chat template: the training data are conversations, so it needs one"
            )
        self.tokenizer, self.seed, self.max_script = tokenizer, seed, max_script
        turns = [{"role": role, "content": SENTINEL} for role in ("user", "assistant", "user")]
        self.opening, self.reply = self._pieces(turns[:1])
        _, _, self.again, _ = self._pieces(turns)
        for piece in (self.reply, self.again):
            if self._encode(piece)[0] != tokenizer.eos_token_id:
                raise ValueError(
                    f"a turn of the chat template ends in {piece!r}, which does not begin with the end token {tokenizer.eos_token!r}: "
                    "the target could not end the turns that it writes"
                )

    def _pieces(self, turns: list[dict[str, str]]) -> list[str]:
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True).split(SENTINEL)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def __call__(self, document: int) -> tuple[list[int], float]:
        """Script of a document and the temperature of its answers; a function of the seed and the document's number alone."""
        rng = random.Random(f"{self.seed} {document}")
        temperature = rng.choices([value for value, _ in TEMPERATURES], [share for _, share in TEMPERATURES])[0]
        while True:
            script = [*self._turn(self.opening, rng, None), ANSWER]
            if rng.random() < SECOND_TURN_SHARE:
                script += [*self._turn(self.again, rng, fill(rng.choice(FOLLOW_UPS), rng))[1:], ANSWER]
            if len(script) < self.max_script:
                return script, temperature

    def _turn(self, before: str, rng: random.Random, text: str | None) -> list[int]:
        """Everything from the end of the last turn to the start of the answer; `text` None stands for a new request."""
        if rng.random() < INVENTED_SHARE:
            return [*self._encode(before), USER, *self._encode(self.reply)[1:]]
        return self._encode(before + (request(rng) if text is None else text) + self.reply)
